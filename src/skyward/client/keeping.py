"""What an engine does with results that stay on nodes: gets, moves and frees them, as `client/kept.py` decides."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skyward.client import outcomes
from skyward.client.call import CallFuture
from skyward.node.protocol import ClientToAgent
from skyward.transport import blobs

if TYPE_CHECKING:
    from skyward.client.call import Call
    from skyward.client.calls import Action
    from skyward.client.connections import Connections
    from skyward.client.core import Core
    from skyward.client.kept import KeptResult
    from skyward.client.settings import PoolSettings
    from skyward.client.uploads import Uploads

__all__ = ["Keeping"]

log = logging.getLogger("skyward.engine")


class Keeping:
    """The part of an engine that has to do with objects and results that nodes keep."""

    keeping_actions = ("fetch", "got", "get failed", "free")

    if TYPE_CHECKING:
        _lock: threading.RLock
        _changed: threading.Condition
        _closing: bool
        _forgotten: dict[int, list[str]]
        _plan: PoolSettings
        _core: Core
        _connections: Connections
        _uploads: Uploads
        _clock: Callable[[], float]

        def send(self, calls: Sequence[Call]) -> None: ...
        def _connected(self) -> list[int]: ...
        def _check_open(self) -> None: ...
        def _do(self, actions: list[Action]) -> None: ...
        def _defer(self, act: Callable[..., Any], *args: Any) -> None: ...

    # from users

    def forget(self, keys: Sequence[str]) -> None:
        """Has nodes let go of objects that nobody has a Ref to any more."""
        with self._lock:
            if not self._closing:
                for number in self._connected():
                    self._connections.post(number, [ClientToAgent.forget(list(keys))])

    def get_kept(self, result: KeptResult, future: CallFuture[Any]) -> None:
        """Has a result brought here, for the future."""
        with self._lock:
            self._check_open()
            self._tell_kept("get", result, future)

    def release_kept(self, result: KeptResult) -> None:
        """The user has let go of a result."""
        with self._lock:
            if not self._closing:
                self._tell_kept("release", result)
                self._connections.wake()  # nodes are told in the I/O thread, of many at once

    @contextmanager
    def _arguments_there(self, call: Call) -> Generator[None]:
        """For a broadcast, with the lock held: sends the calls among its arguments, and waits for what it takes."""
        if not call.needs:
            yield
            return
        for result in call.needs:
            self._tell_kept("hold", result)  # until the broadcast itself does
        try:
            if call.inner:
                self.send(call.inner)
            while not all(result.state == "there" for result in call.needs):
                self._check_open()
                failed = next((result for result in call.needs if result.error is not None), None)
                if failed is not None:
                    raise outcomes.of_argument(call, failed)
                self._changed.wait(0.2)
            yield
        finally:
            for result in call.needs:
                self._tell_kept("release", result)

    def _tell_kept(self, event: str, *about: Any) -> None:
        self._do(self._core.calls.keep(event, *about, now=self._clock()))

    # doing what the core says; with the lock held

    def _settle_kept(self, call: Call) -> None:
        """Gives the user the Ref; the call, which may be kept to be started again, must not keep it too."""
        ref, call.ref = call.ref, None
        future, call.future = call.future, CallFuture(call.name)
        if ref is not None:
            self._defer(future.fulfil, ref)
        self._changed.notify_all()

    def _do_fetch(self, number: int, wanted: Sequence[blobs.Blob], sources: Sequence[int]) -> None:
        """Has a node get a result from others; where it cannot reach them, it asks for it."""
        places = [(other, *place) for other in sources if (place := self._plan.address(other)) is not None]
        if places:
            messages = [ClientToAgent.fetch(name, size, places) for name, size in wanted]
            self._connections.post(number, messages)

    def _do_got(self, future: CallFuture[Any], wanted: Sequence[blobs.Blob], ours: bool) -> None:
        self._defer(_deliver, future, wanted, ours)

    def _do_get_failed(self, future: CallFuture[Any], error: BaseException) -> None:
        self._defer(future.fail, error)

    def _do_free(self, key: str, nodes: Sequence[int], paths: Sequence[str], names: Sequence[str]) -> None:
        for number in nodes:
            self._forgotten.setdefault(number, []).append(key)
        for name in names:
            self._uploads.drop(name)
        if paths:
            self._defer(_remove, paths)

    def _tell_forgotten(self) -> None:
        """Tells nodes of results that nobody wants any more, of all at once."""
        if self._forgotten:
            forgotten, self._forgotten = self._forgotten, {}
            for number, keys in forgotten.items():
                self._connections.post(number, [ClientToAgent.forget(keys)])


def _deliver(future: CallFuture[Any], wanted: Sequence[blobs.Blob], ours: bool) -> None:
    """Has a future hold a result that lies in files; those that are not ours to remove get other names first."""
    try:
        files = [(path if ours else blobs.duplicate(path), size) for path, size in wanted]
    except OSError as exc:
        future.fail(exc)
        return
    future.settle({"blobs": {str(index): file for index, file in enumerate(files)}}, [b""] * len(files))


def _remove(paths: Sequence[str]) -> None:
    try:
        blobs.remove(paths)
    except OSError as exc:  # they go with the pool's directory
        log.warning("a result that nobody wants cannot be removed: %s", exc)
