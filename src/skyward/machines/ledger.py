"""What was asked of a cloud, on disk before it is asked: one append-only file per pool.

    <state>/pools/<pool>/ledger   a journal, one line per fact; locked while the pool's process lives
    <state>/pools/<pool>/...      the pool's keys, removed with it

intent -> the call -> answer (ids) or refused; gone when read back. A call without either may have made something.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from skyward.api.usage_errors import usable
from skyward.errors import CloudRefused, InvalidArgument, SkywardError
from skyward.transport import journal, private
from skyward.transport.journal import Journal
from skyward.transport.private import is_locked

__all__ = [
    "History",
    "Ledger",
    "Record",
    "content",
    "given_back",
    "histories",
    "in_use",
    "line",
    "parsed",
    "pool_dir",
    "read",
    "remove",
    "shown",
    "state_dir",
    "usable",
]


_FILE = "ledger"
_POOLS = "pools"


def state_dir() -> Path:
    given = os.environ.get("SKYWARD_STATE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "skyward"


def pool_dir(pool: str, root: Path | None = None) -> Path:
    if not usable(pool):
        raise InvalidArgument(f"{pool!r} is not the name of a pool. Names have letters, digits, '.', '_' and '-'.")
    return (root or state_dir()) / _POOLS / pool


@dataclass(frozen=True)
class History:
    pool: str
    records: tuple[Record, ...] = ()
    damaged: int = 0

    @property
    def metadata(self) -> Mapping[str, Any]:
        return next((record.data for record in self.records if record.fact == "open"), dict[str, Any]())

    @property
    def region(self) -> str | None:
        """Every line that names a region repeats it, since any line may be lost."""
        return next((r.data["region"] for r in self.records if "region" in r.data), None)

    @property
    def unanswered(self) -> tuple[Record, ...]:
        settled = {record.call for record in self.records if record.fact in ("answer", "refused")}
        return tuple(r for r in self.records if r.fact == "intent" and r.call not in settled)

    @property
    def detached_until(self) -> float:
        """Until when a detached run may use the machines; 0 if none does."""
        return max((r.data["until"] for r in self.records if r.data.get("detached")), default=0.0)

    @property
    def certain(self) -> bool:
        return bool(self.metadata) and not self.damaged and not self.unanswered

    def made(self, kind: str) -> dict[str, Record]:
        return {
            id: record
            for record in self.records
            if record.fact == "answer" and record.kind == kind
            for id in record.ids
        }

    def gone(self, kind: str) -> dict[str, float]:
        return {id: r.time for r in self.records if r.fact == "gone" and r.kind == kind for id in r.ids}

    def left(self, kind: str) -> tuple[str, ...]:
        gone = self.gone(kind)
        return tuple(id for id in self.made(kind) if id not in gone)


def read(pool: str, root: Path | None = None) -> History | None:
    try:
        _check(root or state_dir())
        found = content(pool_dir(pool, root) / _FILE)
    except (FileNotFoundError, NotADirectoryError, InvalidArgument):
        return None
    if found is None:
        return None
    records: list[Record] = []
    damaged = 0
    for each in found.split(b"\n"):
        if each:
            record = parsed(each)
            damaged += record is None
            if record is not None:
                records.append(record)
    return History(pool, tuple(records), damaged)


def histories(root: Path | None = None) -> Iterator[History]:
    _check(root or state_dir())
    try:
        names = sorted(path.name for path in ((root or state_dir()) / _POOLS).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        found = None if name.startswith(".") else read(name, root)
        if found is not None:
            yield found


def in_use(pool: str, root: Path | None = None) -> bool:
    try:
        return is_locked(pool_dir(pool, root) / _FILE)
    except InvalidArgument:
        return False


def remove(pool: str, root: Path | None = None) -> None:
    try:
        directory = pool_dir(pool, root)
    except InvalidArgument:
        return
    if not in_use(pool, root):
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def given_back(pool: str) -> Generator[Ledger | None]:
    """Holds a pool's ledger, then removes the pool's files, unless the block fails."""
    ledger = Ledger.resume(pool)
    try:
        yield ledger
        if ledger is not None:
            ledger.remove()
        remove(pool)
    finally:
        if ledger is not None:
            ledger.let_go()


class Ledger:
    """Every line is on disk before the method returns."""

    def __init__(self, pool: str, directory: Path, lines: Journal) -> None:
        self.pool, self.directory = pool, directory
        self._lines, self._pid = lines, os.getpid()
        self._calls = itertools.count(1)

    @classmethod
    def start(cls, pool: str, metadata: Mapping[str, Any], root: Path | None = None) -> Ledger:
        directory = pool_dir(pool, root)
        _make(root or state_dir())
        _sweep(directory.parent)
        fresh = directory.parent / f".{pool}.{os.getpid()}.{time.monotonic_ns()}"
        fresh.mkdir(mode=0o700)
        fresh.chmod(0o700)  # a umask may have taken even our own rights away
        ledger = cls(pool, fresh, Journal(fresh / _FILE, create=True))
        try:
            who = {"host": socket.gethostname(), "pid": os.getpid()}
            ledger._write(Record("open", time=time.time(), data={**metadata, **who}))
            os.rename(fresh, directory)  # only now others see it, and see it locked
        except OSError as exc:
            ledger.let_go()
            shutil.rmtree(fresh, ignore_errors=True)
            if directory.exists():
                raise InvalidArgument(
                    f"there is a pool {pool!r} already, open or left behind ({directory}). "
                    f"Choose another name, or end it with `sky down {pool} --yes`."
                ) from exc
            raise
        ledger.directory = directory
        _sync_directory(directory.parent)
        return ledger

    @classmethod
    def resume(cls, pool: str, root: Path | None = None) -> Ledger | None:
        try:
            _check(root or state_dir())
            directory = pool_dir(pool, root)
            return cls(pool, directory, Journal(directory / _FILE, create=False))
        except (FileNotFoundError, NotADirectoryError, InvalidArgument):
            return None
        except BlockingIOError as exc:
            found = read(pool, root)
            user = found.metadata if found else dict[str, Any]()
            raise SkywardError(
                f"pool {pool!r} is in use by process {user.get('pid', '?')} on {user.get('host', 'this computer')}. "
                "End that program, or wait until it has given its machines back."
            ) from exc

    @property
    def history(self) -> History:
        return read(self.pool, self.directory.parent.parent) or History(self.pool)

    def intent(self, kind: str, **data: Any) -> str:
        call = f"{os.getpid()}-{next(self._calls)}-{time.time_ns() % 10**9}"
        self._write(Record("intent", call, kind, (), time.time(), data))
        return call

    def answer(self, call: str, kind: str, *ids: str, **data: Any) -> None:
        self._write(Record("answer", call, kind, ids, time.time(), data))

    def refused(self, call: str, kind: str, reason: str) -> None:
        self._write(Record("refused", call, kind, (), time.time(), {"reason": reason[:500]}))

    def create(self, kind: str, make: Callable[[], str], **data: Any) -> str:
        """The id of what `make` creates; recorded before and after."""
        call = self.intent(kind, **data)
        try:
            id = make()
        except CloudRefused as exc:
            if not exc.unanswered:
                self.refused(call, kind, str(exc))
            raise
        self.answer(call, kind, id)
        return id

    def gone(self, kind: str, *ids: str) -> None:
        if ids:
            self._write(Record("gone", "", kind, ids, time.time()))

    def note(self, **data: Any) -> None:
        self._write(Record("note", "", "", (), time.time(), data))

    def remove(self) -> None:
        if self._pid == os.getpid():
            shutil.rmtree(self.directory, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Unlocks it for whoever releases the rest."""
        self._lines.close()

    def __del__(self) -> None:
        self.let_go()  # nobody can give the pool back any more who does not take it over

    def _write(self, record: Record) -> None:
        if not self._lines.is_open:
            raise SkywardError(f"the ledger of pool {self.pool!r} was released by this process; nothing is written.")
        self._lines.append_lines(line(record))


def _make(root: Path) -> None:
    try:
        private.make(root, _POOLS)
    except private.NotPrivate as exc:
        raise _unsafe(root, exc) from exc


def _check(root: Path) -> None:
    """Refuses ledgers that others could have written."""
    try:
        private.check(root, _POOLS)
    except private.NotPrivate as exc:
        raise _unsafe(root, exc) from exc


def _unsafe(root: Path, reason: Exception) -> SkywardError:
    return SkywardError(
        f"{reason}, so the ledgers in {root} may not be yours. Look at what is there, then run "
        f"`chmod -R go-rwx {shlex.quote(str(root))}`, or set SKYWARD_STATE to a directory that is yours alone."
    )


def _sweep(pools: Path) -> None:
    for path in pools.glob(".*"):
        try:
            if time.time() - path.lstat().st_mtime < 600:
                continue  # being made, and perhaps not locked yet
            Journal(path / _FILE, create=False).close()
        except BlockingIOError:
            continue
        except OSError:
            pass  # it holds no ledger, or is gone already
        shutil.rmtree(path, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# The lines of a ledger: how a fact is written, and what of a file is believed when it is read.
#
# What a ledger says decides where requests go and what is ended, so it is read like the word of a stranger: a line
# with anything in it that we could not have written counts as damaged.


log = logging.getLogger("skyward.ledger")

Fact = Literal["open", "intent", "answer", "refused", "gone", "note"]

_MOST = 64 << 20
_LONGEST_LINE = 1 << 20
_TEXTS = ("provider", "region", "profile", "endpoint_url", "owner", "host", "ssh_from", "token", "name", "detached")
_NUMBERS = ("expires", "pid", "price", "count", "until")
_UNKNOWN = {"price": math.inf}  # what stands for a number that nobody knows
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Record:
    fact: Fact
    call: str = ""
    kind: str = ""
    ids: tuple[str, ...] = ()
    time: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


def line(record: Record) -> bytes:
    body = {
        "fact": record.fact,
        "call": record.call,
        "kind": record.kind,
        "ids": list(record.ids),
        "time": record.time,
        "data": dict(record.data),
    }
    return journal.line(body)


def parsed(line: bytes) -> Record | None:
    body = journal.parsed(line, _LONGEST_LINE)
    try:
        return None if body is None else _checked(body)
    except KeyError:
        return None


def content(path: Path) -> bytes | None:
    try:
        return journal.content(path, _MOST)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as exc:  # a link, or a file that we may not open
        log.warning("the ledger %s is not read: %s", path, exc.strerror or exc)
        return None


def _checked(body: dict[str, Any]) -> Record | None:
    fact, call, kind, ids, when, data = (body[name] for name in ("fact", "call", "kind", "ids", "time", "data"))
    if not isinstance(ids, list) or not isinstance(data, dict):
        return None
    listed, told = cast("list[Any]", ids), cast("dict[str, Any]", data)
    good = (
        isinstance(fact, str)
        and fact in get_args(Fact)
        and all(map(_is_text, (call, kind, *listed)))
        and _is_number(when)
        and all(told.get(name) is None or _is_text(told[name]) for name in _TEXTS)
        and all(told.get(name) in (None, _UNKNOWN.get(name)) or _is_number(told[name]) for name in _NUMBERS)
        and (told.get("region") is None or _PLACE.fullmatch(told["region"]) is not None)
    )
    return Record(cast("Fact", fact), call, kind, tuple(listed), when, told) if good else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15 and math.isfinite(value)


def shown(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._: -]*", text) else ascii(text)
