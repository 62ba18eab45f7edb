"""`resume=`: finished results of a map or a group, kept under a name; a second run computes what is missing.

    item      what the arguments are, and how many equal calls come before it: duplicates are separate samples
    version   what code has run. A result lies under its item, and nothing of another version is taken unasked

Results are written on arrival: small ones as lines of the run's journal, large ones as files. Failures are not kept.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from skyward.api.compute import PendingCompute, Resume, name_of
from skyward.api.image import Image
from skyward.api.secret import holds_secret, without_secrets
from skyward.client.call import CallFuture
from skyward.client.futures import UserCode, UserFuture, when_done
from skyward.errors import InvalidArgument
from skyward.history.runs import open_run
from skyward.node.items import FailedItem
from skyward.transport import blobs, journal, payload, tensors
from skyward.transport.fingerprint import Fingerprints, Version, changes

__all__ = ["KIND", "Resumed", "dumped", "surroundings"]

KIND = "results"
_FOLDER = "results"
_LARGE = 1 << 20

Say = Callable[[str, Literal["info", "warning"]], None]


class _Key(NamedTuple):
    item: str
    version: str


def surroundings(image: Image, plugins: Sequence[str]) -> dict[str, object]:
    """What a result depends on beside its code, as entries of its version."""
    locked = blobs.digest(Path(image.lock).read_bytes()) if image.lock is not None else ""
    return {
        "Python": ".".join(map(str, image.python_version)),
        "packages of the image": (image.environment_hash, locked),
        "variables of the image": sorted(without_secrets(image.env).items()),  # new tokens change no result
        "plugins": tuple(plugins),
    }


class Resumed:
    """The results of one map or group, known and new.

    It holds the run until all calls have ended, or `finish` is called.
    """

    def __init__(
        self, options: Resume, calls: Sequence[PendingCompute[Any]], around: Mapping[str, object], say: Say
    ) -> None:
        self.name, self._say = options.name, say
        self.known: dict[int, Any] = {}
        self._writing = threading.RLock()  # of one thread twice: a signal handler may ask for a result
        self._closed = False
        self._sent: Sequence[Future[Any]] = ()
        self._left = 0
        self._unwritten: list[bytes] = []
        self._told = set[str]()
        self._keys: list[_Key] = []
        for call in calls:
            _check(call, options.name)
        more = {} if options.extra is None else {"resume_with": options.extra}
        prints = Fingerprints({**around, **more})
        found = [prints.item(call, name_of(call.fn)) for call in calls]
        self._run = open_run(options.name, KIND)
        try:
            for part in (self._run.path / _FOLDER).glob("*.part"):  # of a process that was killed
                part.unlink()
            self._match(options, calls, found)
        except BaseException:
            self.finish()
            raise

    def _match(self, options: Resume, calls: Sequence[Any], found: Sequence[tuple[str, Version]]) -> None:
        facts = self._run.facts
        kept = {_Key(fact["item"], fact["version"]): fact for fact in facts if fact.get("fact") == "result"}
        versions = {fact["id"]: fact["manifest"] for fact in facts if fact.get("fact") == "version"}
        now = {version.id: version.manifest for _, version in found}
        old = {key.item: key for key in kept if key.version not in now}
        counted = Counter[tuple[str, str]]()
        stale: dict[int, _Key] = {}
        for index, (item, version) in enumerate(found):
            counted[item, version.id] += 1
            key = _Key(f"{item}.{counted[item, version.id]}", version.id)
            self._keys.append(key)
            if key in kept:
                self._take(index, kept[key])
            elif key.item in old:
                stale[index] = old[key.item]
        if stale and options.changed is None:
            names = ", ".join(sorted({calls[index].name for index in stale}))
            index, last = stale.popitem()
            changed = changes(versions.get(last.version), now[self._keys[index].version])
            raise InvalidArgument(
                f"resume={self.name!r}: {len(stale) + 1:,} of the kept results are from another version of {names}. "
                f'What has changed since: {changed}. Give changed="keep" to use these results anyway, or '
                'changed="redo" to compute them again.'
            )
        new = [{"fact": "version", "id": id, "manifest": now[id]} for id in now.keys() - versions.keys()]
        if options.changed == "keep":
            for index, key in stale.items():
                self._take(index, kept[key])
                new.append({**kept[key], "version": self._keys[index].version})
        self._write(list(map(journal.line, new)))
        text = (
            f"{len(self.known):,} of {len(calls):,} taken from {self.name}, {len(calls) - len(self.known):,} to compute"
        )
        if options.changed == "redo" and stale:
            text += f"; {len(stale):,} of them are kept from another version"
        elif kept and not self.known:
            text += f"; the results there ({len(kept):,}) are of other calls"
        unreadable = sum(key in kept and index not in self.known for index, key in enumerate(self._keys))
        if unreadable:
            text += f"; {unreadable:,} cannot be read, and are computed again"
        if self._run.damaged:
            text += f"; damaged lines in {self._run.journal.path}, whose results are missing: {self._run.damaged:,}"
        self._say(f"{text}.", "warning" if unreadable or self._run.damaged else "info")

    def _take(self, index: int, fact: Mapping[str, Any]) -> None:
        try:
            self.known[index] = _loaded(self._run.path, fact)
        except Exception:  # its file is gone or damaged, or its class is: it is computed again
            pass

    # results that come

    def keep(self, first: int, results: Sequence[Any]) -> None:
        """Of the calls from number `first` on; a full disk stops nothing else."""
        found = [(index, each) for index, each in enumerate(results, first) if type(each) is not FailedItem]
        self._write([line for index, each in found if (line := self._line(index, each)) is not None])

    def send(self, calls: Sequence[Any], send: Callable[[Any], Any], user: UserCode) -> tuple[list[Any], list[Any]]:
        """The futures of all calls, of which only those without a result are sent; and those sent."""
        left = [index for index in range(len(calls)) if index not in self.known]
        missing = [calls[index] for index in left]
        try:
            self._sent = send(missing) if missing else ()
        except BaseException:
            self.finish()
            raise
        self._left, futures = len(left), dict(zip(left, self._sent, strict=True))
        for index, future in futures.items():
            cast(Any, future).on_load = partial(self._came, index)  # before anybody else has it, who may change it
            when_done(future, partial(user.callbacks.submit, self._ended))  # to read it may run code of the user's
        if not futures:
            self.finish()
        for index in self.known:
            futures[index] = there = UserFuture[Any](user)
            there.set_result(self.known[index])
        return [futures[index] for index in range(len(calls))], missing

    def _came(self, index: int, result: Any) -> None:
        self.keep(index, [result])

    def counting(self, ended: Callable[[Future[Any]], None]) -> Callable[[Future[Any]], None]:
        """Not called for calls whose results were there."""
        return lambda future: ended(future) if isinstance(future, CallFuture) else None

    def _ended(self, future: Future[Any]) -> None:
        if not self._closed:
            _read(future)
        with self._writing:
            self._left -= 1
        if not self._left:
            self.finish()

    def finish(self) -> None:
        """Lets go of the run, after results have been kept that arrived and were not read."""
        for future in self._sent if not self._closed else ():
            if future.done():
                _read(future)
        with self._writing:
            if self._closed:
                return
            self._write([])
            if self._unwritten:
                self._say(f"{len(self._unwritten):,} results could not be kept in {self.name}.", "warning")
            self._run.journal.close()
            self._closed = True

    def _line(self, index: int, result: Any) -> bytes | None:
        try:
            data = dumped(result)
            if holds_secret([data]):
                self._warn(f"results that hold a sky.Secret are not kept in {self.name}; they will be computed again.")
                return None
            fact = {"fact": "result", **self._keys[index]._asdict()}
            if len(data) < _LARGE:
                fact["value"] = base64.b64encode(data).decode()
            else:
                fact["file"] = _written(self._run.path, data)
            return journal.line(fact)
        except Exception as exc:  # it cannot be pickled, or the disk is full
            self._warn(
                f"a result cannot be kept in {self.name} ({type(exc).__name__}: {exc}); it will be computed again."
            )
        return None

    def _write(self, lines: list[bytes]) -> None:
        with self._writing:
            if self._closed:
                return
            self._unwritten += lines
            try:
                if self._unwritten:
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


def _check(call: PendingCompute[Any], name: str) -> None:
    """Refuses a call without a result that could be kept."""
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


def _read(future: Future[Any]) -> None:
    """Reading a result keeps it."""
    try:
        future.result(0)
    except BaseException:  # whoever asks for the result hears of it
        pass


def dumped(result: Any) -> bytes:
    """Classes by name, since the next process has its own; by value what has no name there."""
    tensors.note_loaded_frameworks()
    file = io.BytesIO()
    plain = pickle.Pickler(file, 5)
    plain.dispatch_table = ChainMap(tensors.TABLE, copyreg.dispatch_table)
    try:
        plain.dump(result)
    except (pickle.PicklingError, AttributeError, TypeError):
        file = io.BytesIO()
        cast(Any, payload.Pickler(file)).dump(result)
    return file.getvalue()


def _loaded(folder: Path, fact: Mapping[str, Any]) -> Any:
    if "value" in fact:
        return pickle.loads(base64.b64decode(fact["value"]))
    data = (folder / _FOLDER / fact["file"]).read_bytes()
    if blobs.digest(data) != fact["file"]:
        raise ValueError("the file is damaged")
    return pickle.loads(data)


def _written(folder: Path, data: bytes) -> str:
    """The name of a file with this content, which is there as a whole or not at all."""
    name = blobs.digest(data)
    (folder / _FOLDER).mkdir(mode=0o700, exist_ok=True)
    part = folder / _FOLDER / f".{os.getpid()}-{threading.get_ident()}.part"
    try:
        part.write_bytes(data)
        os.rename(part, folder / _FOLDER / name)
    finally:
        part.unlink(missing_ok=True)
    return name
