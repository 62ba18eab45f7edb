"""Files and folders as lists of entries, read and written below one directory: both sides of `push` and `pull`.

Nothing is read or written through a link below that directory, and no link is made that leads out of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple, cast

from skyward.transport.frames import Malformed

__all__ = ["Changed", "Entry", "Reader", "Writer", "checked_entries", "leads_out", "scan"]

MOST_ENTRIES = 1_000_000
MOST_DEPTH = 100
_LONGEST_PATH = 4096
_LONGEST_NAME = 255
_PART = ".skyward-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Changed(OSError):
    """A file is not what it was when it was looked at."""


class Entry(NamedTuple):
    """A file ("f"), a folder ("d") or a link ("l")."""

    path: str
    kind: str
    size: int = 0
    mtime: int = 0
    """In nanoseconds."""
    mode: int = 0
    target: str = ""


def scan(path: str, left_out: list[str]) -> tuple[str, Iterator[Entry]]:
    """The directory that entries are relative to, and the entries. Inside, other things than files, folders and links
    are named in `left_out`. If `path` is a link, it is followed.
    """
    real = os.path.realpath(path)
    found = os.stat(real)
    if stat.S_ISDIR(found.st_mode):
        return real, _walk(real, "", _entry("", found), 0, left_out)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is neither a file nor a folder", path)
    return os.path.dirname(real), iter([_entry(os.path.basename(real), found)])


def checked_entries(raw: Sequence[Any]) -> list[Entry]:
    return [_checked(entry) for entry in raw]


def leads_out(path: str, target: str) -> bool:
    """Whether a link at `path` may lead out of the directory. Steps up may only come first: after a step down they
    could start from wherever another link leads.
    """
    steps = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((i for i, part in enumerate(steps) if part != ".."), len(steps))
    return target.startswith("/") or ups > path.count("/") or ".." in steps[ups:]


class Reader:
    def __init__(self, root: str) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root)

    def read(self, path: str, offset: int, length: int) -> tuple[bytes, int, int]:
        with _parent(self._root, path) as (folder, name):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Changed(errno.EINVAL, "it is not a file any more", path)
            pieces: list[bytes] = []
            while length and (data := os.pread(fd, length, offset)):
                pieces.append(data)
                offset, length = offset + len(data), length - len(data)
            found = os.fstat(fd)
            return b"".join(pieces), found.st_size, found.st_mtime_ns
        finally:
            os.close(fd)


class Writer:
    def __init__(self, root: str) -> None:
        os.makedirs(root, exist_ok=True)
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root)

    def make_folder(self, path: str) -> None:
        """Writable until `finish`."""
        if not path:
            return
        with _parent(self._root, path) as (folder, name):
            try:
                os.mkdir(name, 0o700, dir_fd=folder)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise FileExistsError(errno.EEXIST, "something other than a folder is there", path) from None

    def finish(self, entries: Sequence[Entry]) -> None:
        """Makes links, and then gives folders their modes, deepest first: a mode may forbid entering."""
        for entry in entries:
            if entry.kind == "l":
                self.link(entry)
        for entry in sorted(entries, reverse=True):
            if entry.kind == "d" and entry.path:
                with _parent(self._root, entry.path) as (folder, name):
                    fd = os.open(name, _FOLDER, dir_fd=folder)
                    try:
                        os.fchmod(fd, entry.mode & 0o777)
                    finally:
                        os.close(fd)

    def has(self, entry: Entry) -> int | None:
        """None if a file is complete; else how many bytes an earlier attempt wrote."""
        try:
            with _parent(self._root, entry.path) as (folder, name):
                if _same(folder, name, entry):
                    return None
                part = _found(folder, _part_name(entry))
                known = part is not None and stat.S_ISREG(part.st_mode) and part.st_size <= entry.size
                return part.st_size if part is not None and known else 0
        except FileNotFoundError:  # the folder is not there yet
            return 0

    def write(self, entry: Entry, offset: int, data: Any) -> None:
        """Pieces come in order; the last one gives the file its name."""
        with _parent(self._root, entry.path) as (folder, name):
            part = _part_name(entry)
            flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if offset else os.O_CREAT | os.O_TRUNC)
            try:
                fd = os.open(part, flags, 0o600, dir_fd=folder)
            except FileNotFoundError:
                raise (Changed(errno.ENOENT, _GONE, entry.path) if offset else _no_folder(entry)) from None
            try:
                if os.fstat(fd).st_size < offset:
                    raise Changed(errno.EINVAL, _GONE, entry.path)
                done = offset + _pwrite(fd, data, offset)
                if done < entry.size:
                    return
                os.ftruncate(fd, entry.size)
                os.fchmod(fd, entry.mode & 0o777)
                os.utime(fd, ns=(entry.mtime, entry.mtime))
            except OSError as exc:
                if exc.errno in _NO_ROOM:
                    os.unlink(part, dir_fd=folder)
                raise
            finally:
                os.close(fd)
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)

    def forget_parts(self, entry: Entry) -> None:
        with _parent(self._root, entry.path) as (folder, _):
            own, others = _part_name(entry), _part_name(entry).rsplit("-", 1)[0]
            for name in os.listdir(folder):
                if name.startswith(others) and name != own:
                    os.unlink(name, dir_fd=folder)

    def link(self, entry: Entry) -> None:
        if leads_out(entry.path, entry.target):
            raise Malformed(f"the link {entry.path[:200]!r} leads out of its folder")
        with _parent(self._root, entry.path) as (folder, name):
            try:
                if os.readlink(name, dir_fd=folder) == entry.target:
                    return
            except OSError:
                pass  # it is not there, or something else
            part = _part_name(entry)
            try:
                os.symlink(entry.target, part, dir_fd=folder)
            except FileExistsError:
                os.unlink(part, dir_fd=folder)
                os.symlink(entry.target, part, dir_fd=folder)
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)


_GONE = "what was written of it before is gone"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def _walk(path: str, name: str, own: Entry, depth: int, left_out: list[str]) -> Iterator[Entry]:
    yield own
    if depth > MOST_DEPTH:
        left_out.append(f"{name[:200]} (it is nested too deeply)")
        return
    try:
        with os.scandir(path) as children:
            found = sorted(children, key=lambda child: child.name)
    except OSError as exc:
        if not name:
            raise
        left_out.append(f"{name} ({exc.strerror})")
        return
    for child in found:
        inner = f"{name}/{child.name}" if name else child.name
        if child.name.startswith(_PART) and child.name.endswith(".part"):
            continue
        try:
            about = child.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # it was removed just now
        if stat.S_ISDIR(about.st_mode):
            yield from _walk(child.path, inner, _entry(inner, about), depth + 1, left_out)
        elif stat.S_ISLNK(about.st_mode):
            target = os.readlink(child.path)
            if leads_out(inner, target):
                left_out.append(f"{inner} (a link that leads out of the folder, to {target[:200]})")
            else:
                yield Entry(inner, "l", target=target)
        elif stat.S_ISREG(about.st_mode):
            yield _entry(inner, about)
        else:
            left_out.append(f"{inner} (neither a file, a folder nor a link)")


def _entry(path: str, found: os.stat_result) -> Entry:
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, "d", 0, 0, mode)
    return Entry(path, "f", found.st_size, found.st_mtime_ns, mode)


def _checked(raw: Any) -> Entry:
    if raw.__class__ is not list or len(raw) != 6 or [part.__class__ for part in raw] != [str, str, int, int, int, str]:
        raise Malformed("an entry of a folder without its parts")
    entry = Entry(*cast("list[Any]", raw))
    names = entry.path.split("/") if entry.path else []
    try:
        sizes = [len(os.fsencode(name)) for name in names]
        whole, target = len(os.fsencode(entry.path)), os.fsencode(entry.target)
    except UnicodeError:
        raise Malformed("an entry of a folder whose name cannot be a name") from None
    if any(name in ("", ".", "..") or "\0" in name for name in names) or not all(s <= _LONGEST_NAME for s in sizes):
        raise Malformed(f"{entry.path[:200]!r} is not a path below a folder")
    if whole > _LONGEST_PATH or len(names) > MOST_DEPTH + 2 or (not names and entry.kind != "d"):
        raise Malformed(f"{entry.path[:200]!r} is not a path below a folder")
    if entry.kind not in ("f", "d", "l") or not 0 <= entry.size < 1 << 62 or not abs(entry.mtime) < 1 << 62:
        raise Malformed(f"{entry.path[:200]!r} is neither a file, a folder nor a link")
    if not 0 <= entry.mode <= 0o777 or len(target) > _LONGEST_PATH or b"\0" in target:
        raise Malformed(f"{entry.path[:200]!r} has a mode or a target that cannot be")
    if entry.kind == "l" and (not target or leads_out(entry.path, entry.target)):
        raise Malformed(f"the link {entry.path[:200]!r} leads out of its folder")
    return entry


@contextmanager
def _parent(root: int, path: str) -> Generator[tuple[int, str]]:
    """Opened step by step, so that no step is a link."""
    *folders, name = path.split("/")
    fd = os.dup(root)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, name
    except OSError as exc:
        raise type(exc)(exc.errno, _why(exc), path) from exc
    finally:
        os.close(fd)


def _no_folder(entry: Entry) -> OSError:
    return FileNotFoundError(errno.ENOENT, "there is no folder for it", entry.path)


def _why(error: OSError) -> str:
    if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a link is not followed
        return "a link or a file lies on the way"
    return error.strerror or str(error)


def _same(folder: int, name: str, entry: Entry) -> bool:
    found = _found(folder, name)
    if (
        found is None
        or not stat.S_ISREG(found.st_mode)
        or (found.st_size, found.st_mtime_ns) != (entry.size, entry.mtime)
    ):
        return False
    if stat.S_IMODE(found.st_mode) & 0o777 != entry.mode:
        os.chmod(name, entry.mode, dir_fd=folder)
    return True


def _found(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _part_name(entry: Entry) -> str:
    """Different for each version of the file."""
    name = blake2b(os.fsencode(entry.path.rpartition("/")[2]), digest_size=8).hexdigest()
    version = blake2b(repr(entry[2:]).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"{_PART}{name}-{version}.part"


def _pwrite(fd: int, data: Any, offset: int) -> int:
    view, done = memoryview(data).cast("B"), 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], offset + done)
    return done
