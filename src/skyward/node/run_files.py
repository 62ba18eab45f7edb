"""Copies what a detached run has produced: its output, its result and its program's files.

    run's folder --listing, pieces--> <directory>/journal, output, results/     `sky fetch`; `results=`, by the steward

An interrupted copy is continued by the next one: what is there is compared, and not copied again.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from skyward.errors import InvalidArgument, SkywardError
from skyward.node.run_folder import JOURNAL, OUTPUT, RunFolder
from skyward.transport.trees import Entry, Writer, checked_entries, leads_out

__all__ = ["Fetched", "fetch", "pieces"]

_FRESH = 3_000_000_000  # nanoseconds without a change until a file of a program that runs counts as whole
_UNFINISHED = ".part"


@dataclass(frozen=True)
class Fetched:
    path: Path
    """The directory with `output` and `results/`; `results/return.pkl` is the pickled result of `sky.detach`."""
    files: int
    """Of how many files something was copied, since they were new or had changed."""
    size: int
    """How many bytes were copied."""
    writing: Sequence[str]
    """Files that the program may still be writing: fetch again when it is over."""
    left_out: Sequence[str]
    """Links that lead out of `results/`."""


def fetch(name: str, folder: RunFolder, directory: Path, over: bool) -> Fetched:
    """`over`: whether nothing more is written to the folder."""
    copied: list[int] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()) and not (directory / JOURNAL).is_file():
            raise InvalidArgument(f"{directory} is not empty, nor from an earlier fetch. Choose another directory.")
        with open(directory / JOURNAL, "ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_same(name, folder, directory)
            now, entries, left_out = _listed(folder)
            copied.extend(_append(folder, each, directory / each) for each in (JOURNAL, OUTPUT))
            whole = [entry for entry in entries if over or not entry.path.endswith(_UNFINISHED)]
            with closing(Writer(str(directory))) as writer:
                copied.extend(_copy(folder, entry, writer) for entry in whole)
            later = set(_listed(folder)[1])
    except BlockingIOError:
        raise SkywardError(f"another process copies the run {name} to {directory}. Wait until it has ended.") from None
    except OSError as exc:
        raise SkywardError(
            f"copying the run {name} to {directory} failed: {exc}. What was copied stays; fetch it again to continue."
        ) from exc
    fresh = {entry.path for entry in whole if entry.kind == "f" and (entry not in later or now - entry.mtime < _FRESH)}
    parts = {entry.path for entry in entries if entry not in whole}
    writing = [] if over else [OUTPUT, *sorted(fresh | parts)]
    return Fetched(directory, sum(map(bool, copied)), sum(copied), writing, left_out)


def _listed(folder: RunFolder) -> tuple[int, list[Entry], list[str]]:
    """What time it is there, the program's files, and which links are left out."""
    listed = folder.listing()
    left_out = [raw[0] for raw in listed["entries"] if raw[1] == "l" and leads_out(raw[0], raw[5])]
    return listed["now"], checked_entries([raw for raw in listed["entries"] if raw[0] not in left_out]), left_out


def _check_same(name: str, folder: RunFolder, directory: Path) -> None:
    """The journal tells runs apart: it is only appended to."""
    earlier = (directory / JOURNAL).read_bytes()
    if earlier and b"".join(pieces(folder, JOURNAL))[: len(earlier)] != earlier:
        raise InvalidArgument(f"{directory} has the files of a run other than {name}. Choose another directory.")


def pieces(folder: RunFolder, name: str, offset: int = 0) -> Iterator[bytes]:
    while piece := folder.piece(name, offset):
        offset += len(piece)
        yield piece


def _append(folder: RunFolder, name: str, path: Path) -> int:
    """What is new in a file that only grows."""
    before = path.stat().st_size if path.exists() else 0
    with open(path, "ab") as file:
        return sum(map(file.write, pieces(folder, name, before)))


def _copy(folder: RunFolder, entry: Entry, writer: Writer) -> int:
    if entry.kind == "d":
        writer.make_folder(entry.path)
    elif entry.kind == "l":
        writer.link(entry)
    elif (offset := writer.has(entry)) is not None:
        writer.forget_parts(entry)
        before = offset
        while True:
            piece = folder.piece(entry.path, offset)[: entry.size - offset]
            writer.write(entry, offset, piece)  # the last piece gives the file its name
            offset += len(piece)
            if not piece or offset == entry.size:
                return offset - before
    return 0
