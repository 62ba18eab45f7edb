"""`resume=`: finished results of a map or a group, kept under a name; a second run computes what is missing.

    item      what the arguments are      a result lies under its item
    version   what code has run           ... and says of which version it is; of another one, nothing is taken unasked
    nth       how many equal calls come before it: duplicates are separate samples

Results are written when they arrive: small ones as lines of the run's journal, large ones as files. Failures are not
kept.
"""

from __future__ import annotations

import base64
import copyreg
import inspect
import io
import os
import pickle
import threading
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

from skyward.api.compute import PendingCompute, Resume, name_of
from skyward.api.image import Image
from skyward.api.secret import Secret, without_secrets
from skyward.client.call import CallFuture
from skyward.client.futures import UserCode, UserFuture, when_done
from skyward.errors import InvalidArgument
from skyward.history.runs import Opened, open_run
from skyward.machines.ledger import state_dir
from skyward.transport import blobs, journal, payload, tensors
from skyward.transport.fingerprint import Fingerprints, Version

__all__ = ["KIND", "Resumed", "surroundings"]

KIND = "results"
_FOLDER = "results"
_LARGE = 1 << 20
_SHOWN = 6
_ENDING = 10.0

Say = Callable[[str, Literal["info", "warning"]], None]
"""Tells the user something."""


class _Key(NamedTuple):
    item: str
    version: str
    nth: int


class _HoldsSecret(Exception):
    """A result has a Secret in it, which is written nowhere."""


def surroundings(image: Image, plugins: Sequence[str]) -> dict[str, object]:
    """What else than its code a result depends on, as entries of its version."""
    locked = blobs.digest(Path(image.lock).read_bytes()) if image.lock is not None else ""
    return {
        "Python": ".".join(map(str, image.python_version)),
        "packages of the image": (image.environment_hash, locked),
        "variables of the image": sorted(without_secrets(image.env).items()),  # new tokens change no result
        "plugins": tuple(plugins),
    }


class Resumed:
    """The results of one map or group: which were there, and those that come.

    It holds the run until all calls have ended, or `finish` is called.
    """

    def __init__(
        self, options: Resume, calls: Sequence[PendingCompute[Any]], around: Mapping[str, object], say: Say
    ) -> None:
        self.name, self._say = options.name, say
        self.known: dict[int, Any] = {}
        self._writing = threading.RLock()  # of one thread twice: a signal handler may ask for a result
        self._closed = threading.Event()
        self._unwritten: list[bytes] = []
        self._left = self._unsettled = self._lost = 0
        self._told = set[str]()
        checked = [_checked(call, options.name) for call in calls]
        more = {} if options.extra is None else {"resume_with": options.extra}
        prints = Fingerprints({**around, **more})
        found = [prints.item(call, name_of(call.fn)) for call in checked]
        self._run = _opened(options.name)
        _OPEN[_place(self.name)] = self
        try:
            self._match(options, calls, found)
        except BaseException:
            self.finish()
            raise

    def _match(self, options: Resume, calls: Sequence[Any], found: Sequence[tuple[str, Version]]) -> None:
        kept = {_key(fact): fact for fact in self._run.facts if fact.get("fact") == "result"}
        versions = {fact["id"]: fact["manifest"] for fact in self._run.facts if fact.get("fact") == "version"}
        taken = {(fact["of"], fact["for"]) for fact in self._run.facts if fact.get("fact") == "keep"}
        now = {version.id: version.manifest for _, version in found}
        old: dict[tuple[str, int], list[_Key]] = {}
        for key in kept:
            if key.version not in now:
                old.setdefault((key.item, key.nth), []).append(key)
        counted: Counter[tuple[str, str]] = Counter()
        self._keys: list[_Key] = []
        stale: dict[int, _Key] = {}
        for index, (item, version) in enumerate(found):
            key = _Key(item, version.id, counted[item, version.id])
            counted[item, version.id] += 1
            self._keys.append(key)
            others = old.get((item, key.nth), ())
            same = next((other for other in others if (other.version, version.id) in taken), None)
            if (fact := kept.get(key) or (kept[same] if same else None)) is not None:
                self._take(index, fact)
            elif others:
                stale[index] = others[-1]
        if stale and options.changed is None:
            raise self._changed(stale, versions, now, calls)
        facts: list[dict[str, Any]] = [
            {"fact": "version", "id": id, "manifest": dict(manifest)}
            for id, manifest in now.items()
            if id not in versions
        ]
        if options.changed == "keep":
            for index, key in stale.items():
                self._take(index, kept[key])
            pairs = {(key.version, self._keys[index].version) for index, key in stale.items()}
            facts += [{"fact": "keep", "of": of, "for": new} for of, new in pairs]
        self._write([journal.line(fact) for fact in facts])
        self._tell(len(calls), len(kept), options.changed == "redo" and len(stale))

    def _tell(self, calls: int, kept: int, redone: int) -> None:
        text = f"{len(self.known):,} of {calls:,} taken from {self.name}, {calls - len(self.known):,} to compute"
        if redone:
            text += f"; {redone:,} of them are there of another version"
        elif kept and not self.known:
            text += f"; the {kept:,} results there are of other calls"
        told = next((fact["lines"] for fact in reversed(self._run.facts) if fact.get("fact") == "damaged"), 0)
        damaged = max(0, self._run.damaged - told) + self._lost
        if self._run.damaged > told:
            self._write([journal.line({"fact": "damaged", "lines": self._run.damaged})])
        if damaged:
            text += f"; {damaged:,} are damaged or cannot be read here, and are computed again"
        self._say(f"{text}.", "warning" if damaged else "info")

    def _changed(
        self,
        stale: Mapping[int, _Key],
        versions: Mapping[str, Mapping[str, str]],
        now: Mapping[str, Mapping[str, str]],
        calls: Sequence[PendingCompute[Any]],
    ) -> InvalidArgument:
        names = ", ".join(sorted({calls[index].name for index in stale}))
        paths: dict[str, None] = {}
        for index, key in stale.items():
            before, after = versions.get(key.version, {}), now[self._keys[index].version]
            paths |= dict.fromkeys(path for path in {**after, **before} if before.get(path) != after.get(path))
        shown = "; ".join(list(paths)[:_SHOWN]) + (f"; and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
        return InvalidArgument(
            f"resume={self.name!r}: {len(stale):,} of the results there are of another version of {names}. What has "
            f'changed since: {shown or "the record of that version is damaged"}. Give changed="keep" to take these '
            'results all the same, or changed="redo" to compute them again.'
        )

    def _take(self, index: int, fact: Mapping[str, Any]) -> None:
        try:
            self.known[index] = _loaded(self._run.path, fact)
        except Exception:  # its file is gone or damaged, or its class is: it is computed again
            self._lost += 1

    # results that come

    def keep(self, first: int, results: Sequence[Any]) -> None:
        """Writes results of the calls from number `first` on; a full disk stops nothing but that."""
        lines = [line for index, each in enumerate(results, first) if (line := self._line(index, each)) is not None]
        self._write(lines)

    def send(self, calls: Sequence[Any], send: Callable[[Any], Any], user: UserCode) -> tuple[list[Any], list[Any]]:
        """The futures of all calls, of which only those are sent whose results are missing; and these calls."""
        left = [index for index in range(len(calls)) if index not in self.known]
        missing = [calls[index] for index in left]
        try:
            sent: dict[int, Any] = dict(zip(left, send(missing) if missing else (), strict=True))
        except BaseException:
            self.finish()
            raise
        self.follow(sent)
        return [sent[index] if index in sent else self._there(index, user) for index in range(len(calls))], missing

    def _there(self, index: int, user: UserCode) -> UserFuture[Any]:
        made = UserFuture[Any](user)
        made.set_result(self.known.pop(index))
        return made

    def counting(self, ended: Callable[[Future[Any]], None]) -> Callable[[Future[Any]], None]:
        """The same for calls that were sent: those whose results were there do not count."""
        return lambda future: ended(future) if isinstance(future, CallFuture) else None

    def follow(self, futures: Mapping[int, Future[Any]]) -> None:
        """Keeps the results of these calls, by their numbers, as they end; then lets go of the run."""
        self._left = self._unsettled = len(futures)
        for index, future in futures.items():
            if isinstance(future, CallFuture):
                # before anybody else has it, who may change it
                future.on_load = lambda result, index=index: self.keep(index, [result])
            when_done(future, self._ended)
        if not futures:
            self.finish()

    def _ended(self, future: Future[Any]) -> None:
        self._unsettled -= 1
        user = future.user if isinstance(future, UserFuture) else None
        if user is None:
            self._read(future)
        else:
            user.callbacks.submit(self._read, future)  # reading a result may run code of the user's

    def _read(self, future: Future[Any]) -> None:
        try:
            if not self._closed.is_set() and not future.cancelled() and future.exception(0) is None:
                future.result(0)
        except BaseException:  # whoever asks for the result hears of it
            pass
        with self._writing:
            self._left -= 1
        if not self._left:
            self.finish()

    def finish(self, futures: Sequence[Future[Any]] = ()) -> None:
        """Lets go of the run; results of `futures` that have arrived, and nobody has asked for, are kept first."""
        for future in futures if not self._closed.is_set() else ():
            if future.done() and not future.cancelled():
                future.exception(0)  # which reads the result
        with self._writing:
            if self._closed.is_set():
                return
            self._write([])
            if self._unwritten:
                self._say(f"{len(self._unwritten):,} results could not be kept in {self.name}.", "warning")
            self._run.journal.close()
            _OPEN.pop(_place(self.name), None)
            self._closed.set()

    def wait(self) -> None:
        """If all calls have ended, waits until their results are kept."""
        if not self._unsettled:
            self._closed.wait(_ENDING)

    def _line(self, index: int, result: Any) -> bytes | None:
        try:
            data = _dumped(result)
            key = self._keys[index]
            fact: dict[str, Any] = {"fact": "result", "item": key.item, "version": key.version, "nth": key.nth}
            if len(data) < _LARGE:
                fact["value"] = base64.b64encode(data).decode()
            else:
                fact["file"], fact["size"] = _written(self._run.path, data), len(data)
            return journal.line(fact)
        except OSError as exc:
            self._warn(
                f"a result is not kept in {self.name}: {exc.strerror or exc}. Make room; it will be computed again."
            )
        except _HoldsSecret:
            self._warn(f"results that hold a sky.Secret are not kept in {self.name}; they will be computed again.")
        except Exception as exc:
            self._warn(
                f"a result cannot be kept in {self.name} ({type(exc).__name__}: {exc}); it will be computed again."
            )
        return None

    def _write(self, lines: list[bytes]) -> None:
        with self._writing:
            if self._closed.is_set():
                return
            self._unwritten += lines
            if not self._unwritten:
                return
            try:
                self._run.journal.append_lines(b"".join(self._unwritten), sync=False)
                self._unwritten = []
            except OSError as exc:
                why = exc.strerror or str(exc)
                self._warn(f"results cannot be kept in {self.name}: {why}. Make room: they wait, and are written then.")

    def _warn(self, text: str) -> None:
        """Once for each reason."""
        if text not in self._told:
            self._told.add(text)
            self._say(text, "warning")


_OPEN: dict[str, Resumed] = {}


def _opened(name: str) -> Opened:
    if (mine := _OPEN.get(_place(name))) is not None:
        mine.wait()
    return open_run(name, KIND)


def _place(name: str) -> str:
    return f"{state_dir()}/{name}"


def _checked(call: PendingCompute[Any], name: str) -> PendingCompute[Any]:
    """The call itself; refused if it gives no result that could be kept."""
    if inspect.isgeneratorfunction(call.fn) or inspect.isasyncgenfunction(call.fn):
        raise InvalidArgument(
            f"resume={name!r}: {call.name} is a generator, whose results are a stream, and cannot be kept. Have it "
            "return a list."
        )
    if call.kept:
        raise InvalidArgument(
            f"resume={name!r}: the result of {call.name}(...).keep() stays on its node and goes with the pool. Leave "
            "out `.keep()`."
        )
    return call


def _key(fact: Mapping[str, Any]) -> _Key:
    return _Key(fact["item"], fact["version"], fact["nth"])


# Results as bytes: classes by name, since the next process has its own; what has no name there, by value.


class _Plain(pickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap(tensors.TABLE, copyreg.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Secret:
            raise _HoldsSecret
        return NotImplemented


class _ByValue(payload.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Secret:
            raise _HoldsSecret
        return super().reducer_override(obj)


def _dumped(result: Any) -> bytes:
    tensors.note_loaded_frameworks()
    try:
        file = io.BytesIO()
        _Plain(file, 5).dump(result)
    except (pickle.PicklingError, AttributeError, TypeError):
        file = io.BytesIO()
        cast(Any, _ByValue(file)).dump(result)
    return file.getvalue()


def _loaded(folder: Path, fact: Mapping[str, Any]) -> Any:
    if "value" in fact:
        return pickle.loads(base64.b64decode(fact["value"]))
    data = (folder / _FOLDER / fact["file"]).read_bytes()
    if len(data) != fact["size"] or blobs.digest(data) != fact["file"].partition(".")[0]:
        raise ValueError("the file is damaged")
    return pickle.loads(data)


def _written(folder: Path, data: bytes) -> str:
    """The name of a file with this content, which is there as a whole or not at all."""
    name = f"{blobs.digest(data)}.pickle"
    (folder / _FOLDER).mkdir(mode=0o700, exist_ok=True)
    part = folder / _FOLDER / f".{os.getpid()}-{threading.get_ident()}.part"
    try:
        part.write_bytes(data)
        os.rename(part, folder / _FOLDER / name)
    finally:
        part.unlink(missing_ok=True)
    return name
