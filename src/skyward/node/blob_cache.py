"""The blobs (large buffers) of a node: arguments from the client or other nodes, results for the client.

    client --pieces--> node 0 --TLS, whole--> node 1, node 2, ...

A node on the client's computer uses the client's directory (`shared`).
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyward.node.protocol import AgentToClient, Blobs, Files
from skyward.transport import blobs
from skyward.transport.codec import Message
from skyward.transport.frames import encode
from skyward.transport.link import greet
from skyward.transport.roles import node_role

if TYPE_CHECKING:
    import ssl

__all__ = ["BlobCache"]

_PIECE = 1 << 18
_WINDOW = 4 << 20
_PATIENCE = 600.0
_WORD = 3.0
_REACHING = 10.0
_PART = ".part"
_NAME = re.compile(r"[0-9a-f]{24,32}")

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors that pass by themselves

log = logging.getLogger("skyward.engine")

Tell = Callable[[], None]


@dataclass(eq=False)
class _Load:
    call: str
    files: deque[tuple[str, int, Files]]  # path, size, and those that it is one of
    tell: Tell
    file: int = -1
    done: int = 0


class BlobCache:
    """`arrivals` lists finished fetches; `wake` makes the agent read it."""

    def __init__(self, directory: str, context: ssl.SSLContext | None) -> None:
        self.shared = True
        self.arrivals: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self._directory, self._context = directory, context
        self._lock = threading.Condition(threading.Lock())  # notified when a blob is no longer coming
        self._parts = blobs.Incoming(directory, _PART)
        self._present = blobs.BlobIndex(lambda: blobs.room(directory))
        self._coming: dict[str, int] = {}
        self._expected: set[str] = set()  # of those, what the client has announced
        self._loads: deque[_Load] = deque()
        self._kept: dict[str, set[str]] = {}  # the blobs of results that stay here, by the key of the result
        self._unwanted: set[str] = set()  # of those, what is on its way though nobody wants it any more
        if context is not None:  # else it is the directory of the client and of all nodes of its computer
            self._take_over()

    def _take_over(self) -> None:
        """After an agent of this node died: arguments are reused, results are lost."""
        blobs.make_again(self._directory)
        for directory in blobs.directories(self._directory):
            for name in os.listdir(directory):
                path = os.path.join(directory, name)
                if name.endswith(_PART) or blobs.key_of(name):
                    self.remove([path])
                elif re.fullmatch(r"[0-9a-f]{32}", name):
                    self._present.add(name, (path, os.path.getsize(path)))

    # arguments

    def take(self, needed: Blobs) -> tuple[dict[str, blobs.Blob], set[str]]:
        names = [name for name, _ in needed.values()]
        with self._lock:
            found = {name: self._present.get(name) for name in names}
            for name, blob in found.items():
                if blob is not None and not os.path.exists(blob[0]):  # somebody has emptied /dev/shm
                    self._present.take_out([name])
                    found[name] = None
            self._present.use(names)
        missing = {name for name, blob in found.items() if blob is None}
        return {index: (found[name] or (self._path(name), size)) for index, (name, size) in needed.items()}, missing

    def locate(self, taken: dict[str, blobs.Blob]) -> None:
        with self._lock:
            for index, (path, _) in taken.items():
                taken[index] = self._present.get(os.path.basename(path)) or taken[index]

    def drop(self, names: Iterable[str]) -> None:
        with self._lock:
            self._present.release(names)
            self._make_room()

    def coming(self, name: str) -> bool:
        with self._lock:
            return name in self._coming

    def expect(self, name: str) -> None:
        with self._lock:
            if self._present.get(name) is None:
                self._coming.setdefault(name, 0)
                self._expected.add(name)
                self._lock.notify_all()

    def unexpect(self, name: str) -> None:
        self._give_up(name)

    def accept(self, name: str, offset: int, total: int, data: Any) -> bool:
        """Pieces come in order; True when complete. After a failure the blob is no longer expected."""
        with self._lock:
            if self._present.get(name) is not None:
                return True  # a peer was faster
            if offset and self._coming.get(name) != offset:
                return False  # an earlier piece found no room
        try:
            self._write(name, offset, data, total)
            if offset + len(data) < total:
                with self._lock:
                    self._coming[name] = offset + len(data)
                return False
            self._complete(name, total)
        except BaseException as exc:
            self._give_up(name)
            if not offset or not isinstance(exc, FileNotFoundError):
                raise
            self._arrived(name, False)  # somebody has removed what there was of it: it is asked for again
            return False
        return True

    def awaited(self, name: str, seconds: float) -> str | None:
        with self._lock:
            self._lock.wait_for(lambda: name not in self._coming or self._present.get(name) is not None, seconds)
            blob = self._present.get(name)
            return None if blob is None else blob[0]

    def discard(self, names: Iterable[str]) -> None:
        with self._lock:
            self.remove(self._present.discard(names))

    def fetch(self, name: str, size: int, sources: Sequence[Sequence[Any]]) -> None:
        with self._lock:
            if name in self._coming or self._present.get(name) is not None:
                return
            self._coming[name] = 0
        try:
            threading.Thread(target=self._fetch, args=(name, size, sources), name="skyward-fetch", daemon=True).start()
        except RuntimeError as exc:  # there are too many threads
            log.warning("blob %s cannot be fetched: %s", name, exc)
            self._give_up(name)
            self._arrived(name, False)

    def serve(self, sock: socket.socket, name: str) -> None:
        with self._lock:
            # the client's word that it comes may still be on its way
            self._lock.wait_for(lambda: name in self._coming or self._present.get(name) is not None, _WORD)
            self._lock.wait_for(lambda: name not in self._coming, _PATIENCE)
            blob = self._present.get(name)
            size = blob[1] if blob is not None else -1
            if blob is not None:
                self._present.use([name])
        try:
            for piece in encode({"size": size}):
                sock.sendall(piece)
            if blob is not None:
                with open(blob[0], "rb") as file:
                    while data := file.read(1 << 20):
                        sock.sendall(data)
        except OSError:
            pass  # the peer asks somebody else
        finally:
            if blob is not None:
                self.drop([name])
            sock.close()

    def _fetch(self, name: str, size: int, sources: Sequence[Sequence[Any]]) -> None:
        good = False
        try:
            good = any(self._fetched_from(name, size, source) for source in sources)
        finally:
            if not good:
                self._give_up(name)  # the agent asks the client for it
            self._arrived(name, good)

    def _fetched_from(self, name: str, size: int, source: Sequence[Any]) -> bool:
        try:
            node, host, port = source
            self._fetch_from(name, size, node, host, port)
            self._complete(name, size)
        except Exception as exc:  # whatever it is: the next source, or the client
            log.debug("blob %s could not be fetched from %s: %r", name, source, exc)
            return False
        return True

    def _fetch_from(self, name: str, size: int, node: int, host: str, port: int) -> None:
        assert self._context is not None, "nodes of one computer share their blobs"
        from skyward.transport.certificates import secure

        raw = socket.create_connection((host, port), timeout=_REACHING)
        with secure(raw, self._context, _REACHING, node_role(node)) as sock:
            answer = greet(sock, {"fetch": name}, time.monotonic() + _PATIENCE)
            if answer["size"] != size:
                raise ValueError("the peer does not have it")
            sock.settimeout(30)
            room = memoryview(bytearray(1 << 20))
            for offset in range(0, max(size, 1), len(room)):  # a piece of a kept result may be empty
                piece = room[: size - offset]
                done = 0
                while done < len(piece):  # a peer's bytes come by 16 KiB, and every write opens the file
                    if not (got := sock.recv_into(piece[done:])):
                        raise ConnectionError("the peer went away")
                    done += got
                self._write(name, offset, piece, size)

    def _write(self, name: str, offset: int, data: Any, total: int) -> None:
        self._path(name)
        if not offset:
            blobs.make_again(self._directory)  # somebody may have emptied /dev/shm
        self._parts.write(name, offset, data, total)

    def _complete(self, name: str, size: int) -> None:
        part = self._parts.path(name)
        path = part.removesuffix(_PART)
        os.rename(part, path)
        self._parts.forget(name)
        with self._lock:
            self._coming.pop(name, None)
            self._expected.discard(name)
            if name in self._unwanted:
                self._unwanted.discard(name)
                blobs.remove([path])
            else:
                self._add(name, (path, size))
            self._lock.notify_all()
            self._make_room()

    def _add(self, name: str, blob: blobs.Blob) -> None:
        self._present.add(name, blob)
        if (key := blobs.key_of(name)) is not None and name not in self._kept.setdefault(key, set()):
            self._kept[key].add(name)
            self._present.use([name])  # it stays, however short room is

    def _give_up(self, name: str) -> None:
        try:
            self._path(name)
            blobs.remove([self._parts.path(name)])
            self._parts.forget(name)
        except (OSError, ValueError) as exc:
            log.debug("the part of blob %s could not be removed: %s", name, exc)
        with self._lock:
            self._coming.pop(name, None)
            self._expected.discard(name)
            self._unwanted.discard(name)
            self._lock.notify_all()

    def _arrived(self, name: str, good: bool) -> None:
        self.arrivals.put((name, good))
        self.wake()

    def _make_room(self) -> None:
        try:
            self.remove(self._present.make_room())
        except OSError as exc:  # not an error of the caller, whose blob is there
            log.warning("no room could be made in %s: %s", self._directory, exc)

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not the name of a blob")
        return os.path.join(self._directory, name)

    # results that stay

    def forget(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                names = self._kept.pop(key, set())
                self._present.release(names)
                self.remove(self._present.take_out(names))
                self._unwanted.update(name for name in self._coming if blobs.key_of(name) == key)

    def bring(self, request: int, key: str, tell: Callable[[Message], None]) -> None:
        with self._lock:
            found = [self._present.get(name) for name in sorted(self._kept.get(key, ()))]
        files: Files = {}
        try:
            # under other names, which are removed as those of any result that was sent
            copies = [(blobs.duplicate(path), size) for path, size in filter(None, found)]
            files = {"blobs": {str(index): copy for index, copy in enumerate(copies)}} if copies else {}
        except OSError as exc:
            log.warning("a kept result cannot be sent: %s", exc)
        self.ship(f"bring {request}", [files], lambda: tell(AgentToClient.Brought(request, files)))

    def keep(self, made: Blobs) -> None:
        """Keeps a result, and names its blobs instead of their paths."""
        if self.shared:
            return
        with self._lock:
            for index, (path, size) in made.items():
                name = os.path.basename(path)
                self._add(name, (path, size))
                made[index] = (name, size)

    # results

    def remove(self, paths: list[str]) -> None:
        try:
            blobs.remove(paths)
        except OSError as exc:  # they go with the pool's directory
            log.warning("a result that nobody gets cannot be removed: %s", exc)

    def ship(self, call: str, values: Sequence[Files], tell: Tell) -> None:
        """Calls `tell` after the blobs were sent, in order per call."""
        found = [(files, paths) for files in values if (paths := files.get("blobs"))]
        if not self.shared and (found or self.shipping(call)):
            sent = deque((path, size, files) for files, paths in found for path, size in paths.values())
            for _, paths in found:
                for index, (path, size) in paths.items():
                    paths[index] = (os.path.basename(path), size)
            self._loads.append(_Load(call, sent, tell))
        else:
            tell()

    def shipping(self, call: str) -> bool:
        return any(load.call == call for load in self._loads)

    def abandon(self) -> None:
        """For a new session: results of the old one are unwanted."""
        for name in list(self._expected):
            self._give_up(name)
        self.forget(list(self._kept))
        for load in self._loads:
            if load.file >= 0:
                os.close(load.file)
            blobs.remove(path for path, _, _ in load.files)
        self._loads.clear()

    def send(self, room: Callable[[], int], tell: Callable[[Message], None]) -> bool:
        while self._loads and room() < _WINDOW:
            load = self._loads[0]
            if not load.files:
                self._loads.popleft()
                load.tell()
                continue
            path, size, value = load.files[0]
            try:
                if load.file < 0:
                    load.file, load.done = os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0
                data = os.pread(load.file, _PIECE, load.done)
            except OSError as exc:
                if exc.errno in _PASSING:
                    return True  # the agent calls this again
                log.warning("a result cannot be sent: %s", exc)
                data = b""
            if data:
                tell(AgentToClient.Part(os.path.basename(path), load.done, size, [data]))
                load.done += len(data)
            else:  # the client must not wait for the rest
                value["incomplete"] = f"its file on the node has {load.done:,} bytes instead of {size:,}"
            if load.done >= size or not data:
                if load.file >= 0:
                    os.close(load.file)
                blobs.remove([path])
                load.file, load.done = -1, 0
                load.files.popleft()
        return bool(self._loads)
