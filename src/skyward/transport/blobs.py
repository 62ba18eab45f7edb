"""Large buffers as files in a private directory, memory-mapped where they are used.

Arguments are named by content, so a repeated one is written once; results by a random name, and their reader removes
them. Blobs of a kept result are named by its key, the attempt and the index of the piece.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from skyward.errors import PoolClosed
from skyward.transport import private, tensors
from skyward.transport.frames import Buffer, nbytes
from skyward.transport.threads import run_in_thread

__all__ = [
    "FULL",
    "KEY",
    "LARGE",
    "SCRATCH",
    "Blob",
    "BlobIndex",
    "Incoming",
    "Spill",
    "Store",
    "digest",
    "directories",
    "draft",
    "duplicate",
    "fetched",
    "keep",
    "kept_names",
    "key_of",
    "make_again",
    "make_directory",
    "read",
    "remove",
    "remove_directory",
    "room",
    "size_of",
    "stowed",
    "write",
]


KEY = 20
LARGE = 1 << 20
SCRATCH = "SKYWARD_SCRATCH"
FULL = (errno.ENOSPC, errno.EDQUOT)
Blob = tuple[str, int]  # path and size

_RAM = Path("/dev/shm")
_DISKS = ("/tmp", "/var/tmp")
_CGROUPS = Path("/sys/fs/cgroup")
_SPILL = "more"
_LOCK = "lock"  # of the process that the directory belongs to
_WEEK = 7 * 86_400.0


def write(directory: str, buffer: Buffer, name: str | None = None) -> Blob:
    """Falls back to disk when the memory file system is full."""
    view = memoryview(buffer).cast("B")

    def fill(fd: int) -> None:
        done = 0
        while done < view.nbytes:
            done += os.write(fd, view[done : done + (1 << 26)])

    path, file = _made(directory, name or os.urandom(12).hex(), fill)
    os.close(file)
    return path, view.nbytes


def draft(directory: str, size: int) -> tuple[mmap.mmap, Blob]:
    name = os.urandom(12).hex()

    def allocate(fd: int) -> None:
        os.posix_fallocate(fd, 0, size)  # a lack of room is an error here, and a signal later

    path, file = _made(directory, name, allocate)
    try:
        return mmap.mmap(file, size), (path, size)
    finally:
        os.close(file)


def digest(buffer: Buffer) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(buffer)


class Incoming:
    def __init__(self, directory: str, suffix: str = "") -> None:
        self._directory, self._suffix = directory, suffix
        self._elsewhere: dict[str, str] = {}

    def path(self, name: str) -> str:
        return self._elsewhere.get(name) or os.path.join(self._directory, name + self._suffix)

    def write(self, name: str, offset: int, data: Buffer, total: int = 0) -> None:
        """The first piece makes the file, if there is room for the `total`."""
        if not offset:
            remove([self.path(name)])  # of an attempt that nobody has ended
            self.forget(name)
            if (place := _with_room(self._directory, total)) != self._directory:
                self._elsewhere[name] = os.path.join(place, name + self._suffix)
        source = path = self.path(name)
        full: list[str] = []
        while True:
            try:
                if path != source and offset:
                    _copy(source, path, offset)
                _write_piece(path, offset, data)
                break
            except OSError as exc:
                if path != source:
                    remove([path])
                if exc.errno not in FULL or (further := _further(os.path.dirname(path), full)) is None:
                    raise
                path = os.path.join(further, name + self._suffix)
        if path != source:
            remove([source])
            self._elsewhere[name] = path

    def forget(self, name: str) -> None:
        self._elsewhere.pop(name, None)


def _write_piece(path: str, offset: int, data: Buffer) -> None:
    # only the first one makes a file: after one that somebody has removed, there would be zeros before this piece
    fresh = 0 if offset else os.O_CREAT | os.O_TRUNC
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | fresh, 0o600)
    try:
        view = memoryview(data)
        while view.nbytes:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(fd)


def _copy(path: str, target: str, size: int) -> None:
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < size:
            if not (data := file.read(min(1 << 20, size - done))):
                raise OSError(errno.EIO, f"it has {done:,} bytes instead of {size:,}", path)
            _write_piece(target, done, data)
            done += len(data)


def read(blob: Sequence[str | int], *, unlink: bool = False) -> memoryview:
    path, size = str(blob[0]), int(blob[1])
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        how = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        mapped = mmap.mmap(fd, size, **how) if size else bytearray()  # the kernel maps no empty file
    finally:
        os.close(fd)
    if unlink:
        remove([path])
    return memoryview(mapped)


def remove(paths: Iterable[str]) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def duplicate(path: str) -> str:
    """Another name for a blob, or a copy where the file system has no hard links."""
    name = os.path.join(os.path.dirname(path), os.urandom(12).hex())
    try:
        os.link(path, name)
    except OSError:
        return write(os.path.dirname(path), read((path, os.path.getsize(path))))[0]
    return name


def make_directory() -> str:
    """A new private directory, in memory where possible; removed after this process has ended."""
    import tempfile  # not in runners

    bases = [tempfile.gettempdir(), *_DISKS]
    if _RAM.is_dir() and os.access(_RAM, os.W_OK):
        bases.insert(0, str(_RAM))
    _sweep(Path(bases[0]))
    # the directory of a pool inside another pool's body lies in that pool's directory, and is removed with it
    made = private.fresh(f"skyward-{os.getpid()}-", *([inner] if (inner := os.environ.get(SCRATCH)) else bases))
    _hold(made)
    return made


def make_again(directory: str) -> bool:
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if not private.is_private(directory):
            raise PermissionError(errno.EACCES, "other users can write to the directory of blobs", directory) from None
        return False
    os.chmod(directory, 0o700)  # a umask may have taken even our own rights away
    return True


def _hold(directory: str) -> None:
    private.let_go(path := os.path.join(directory, _LOCK))
    try:
        private.hold(path)
    except OSError:
        pass  # a file system without locks: it is removed when nothing has changed in it for a week


def room(directory: str) -> int:
    """How many bytes of blobs a directory may hold. In a container, /dev/shm counts as the container's memory."""
    free = os.statvfs(directory)
    return max(LARGE, min(free.f_bavail * free.f_frsize // 4, _memory_limit() // 8))


@lru_cache(1)
def _memory_limit() -> int:
    """Of this process's control group, or of one above it."""
    limits = [1 << 62]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return limits[0]  # no Linux
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        for path in (Path(group), *Path(group).parents):
            try:
                limits.append(int((_CGROUPS / root / str(path).lstrip("/") / file).read_text()))
            except (OSError, ValueError):
                continue  # not ours to see, or "max"
    return min(limits)


def key_of(name: str) -> str | None:
    return name[:KEY] if len(name) == KEY + 8 else None


def kept_names(key: str, attempt: int, count: int) -> list[str]:
    return [f"{key}{attempt % 0x1000:03x}{index:05x}" for index in range(count)]


def keep(directory: str, names: Sequence[str], pieces: Sequence[Buffer], moved: dict[str, Blob]) -> list[Blob]:
    """Makes a blob of each piece of a result; `moved` are blobs already, by index."""
    made = [moved.get(str(index)) for index in range(len(pieces))]
    kept: list[Blob] = []
    try:
        for index, (name, piece) in enumerate(zip(names, pieces, strict=True)):
            path, size = made[index] = made[index] or write(directory, piece)
            target = os.path.join(os.path.dirname(path), name)
            os.rename(path, target)  # in place of one that a process has left which was lost before it told of it
            made[index] = target, size
            kept.append((target, size))
    except BaseException:
        remove(blob[0] for blob in made if blob is not None)
        raise
    return kept


class BlobIndex:
    """Which blobs a directory has, and how many calls need each; not thread-safe."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._blobs: OrderedDict[str, Blob] = OrderedDict()  # least recently used first
        self._uses: Counter[str] = Counter()
        self._bytes = 0

    def get(self, name: str) -> Blob | None:
        return self._blobs.get(name)

    def add(self, name: str, blob: Blob) -> None:
        self._bytes += blob[1] - self._blobs.get(name, ("", 0))[1]
        self._blobs[name] = blob

    def use(self, names: Iterable[str]) -> None:
        """The blobs need not exist yet."""
        for name in names:
            self._uses[name] += 1
            if name in self._blobs:
                self._blobs.move_to_end(name)

    def release(self, names: Iterable[str]) -> None:
        """The blobs stay cached while there is room."""
        for name in names:
            self._uses[name] -= 1
            if self._uses[name] <= 0:
                del self._uses[name]

    def discard(self, names: Iterable[str]) -> list[str]:
        return self.take_out(name for name in names if name not in self._uses)

    def take_out(self, names: Iterable[str]) -> list[str]:
        gone = [blob for name in names if (blob := self._blobs.pop(name, None)) is not None]
        self._bytes -= sum(size for _, size in gone)
        return [path for path, _ in gone]

    def make_room(self) -> list[str]:
        """Drops unused blobs until the rest fits; returns their paths."""
        limit, gone = self._limit(), list[str]()
        if self._bytes <= limit:
            return gone
        for name in [name for name in self._blobs if name not in self._uses]:
            gone += self.take_out([name])
            if self._bytes <= limit:
                break
        return gone


class Store:
    """The client's directory of blobs. A forked child has a copy of this object, and removes nothing."""

    def __init__(self, limit: int | None = None) -> None:
        self.directory = make_directory()
        most = limit or room(self.directory)
        self._index = BlobIndex(lambda: most)
        self._owner = os.getpid()
        self._lock = threading.Lock()  # entered as itself: Ctrl-C within Condition.__enter__ would leave it taken
        self._written = threading.Condition(self._lock)  # notified when a blob is no longer being written
        self._writing: set[str] = set()
        self.closed = False

    def put(self, buffer: Buffer) -> tuple[str, Blob]:
        """Writes a buffer unless its content is there, and keeps it until `release`."""
        name = digest(buffer)
        found, gone = None, list[str]()
        with self._lock:
            self._written.wait_for(lambda: name not in self._writing)
            blob = self._index.get(name)
            if blob is None or not os.path.exists(blob[0]):  # somebody may have emptied /dev/shm
                self._check_directory()
                self._writing.add(name)
            else:
                gone = self._use(name)
                found = blob
        if found is not None:
            remove(gone)
            return name, found
        made: Blob | None = None
        try:
            made = write(self.directory, buffer)
            blob = os.path.join(os.path.dirname(made[0]), name), made[1]
            with self._lock:
                os.rename(made[0], blob[0])
                self._index.add(name, blob)
                gone = self._use(name)
        except BaseException:
            if made is not None:
                remove([made[0]])
            raise
        finally:
            with self._lock:
                self._writing.discard(name)
                self._written.notify_all()
        remove(gone)
        return name, blob

    def _check_directory(self) -> None:
        if self.closed:
            raise PoolClosed("the pool is closed; open it again with `with sky.ComputePool(...) as pool:`.")
        if make_again(self.directory):
            _hold(self.directory)

    def _use(self, name: str) -> list[str]:
        self._index.use([name])
        return _set_aside(self._index.make_room())

    def retain(self, digests: Iterable[str]) -> None:
        with self._lock:
            self._index.use(digests)

    def discard(self, digests: Iterable[str]) -> None:
        names = list(digests)
        if os.getpid() == self._owner:
            with self._lock:
                self._index.release(names)
                gone = _set_aside(self._index.discard(names))
            remove(gone)

    def has(self, digest: str) -> bool:
        with self._lock:
            return self._index.get(digest) is not None

    def release(self, digests: Iterable[str]) -> None:
        if os.getpid() == self._owner:
            with self._lock:
                self._index.release(digests)
                gone = _set_aside(self._index.make_room())
            if gone:
                run_in_thread(partial(remove, gone))  # the I/O thread calls this, and large files take long to remove

    def close(self) -> None:
        if os.getpid() != self._owner:
            self.closed = True  # without the lock: a thread that the child does not have may hold it
            return
        with self._lock:
            self.closed = True
            self._written.wait_for(lambda: not self._writing)  # or there would be files again
        remove_directory(self.directory)


def _set_aside(paths: Iterable[str]) -> list[str]:
    """Renames files quickly; they are removed later."""
    aside: list[str] = []
    for path in paths:
        name = os.path.join(os.path.dirname(path), os.urandom(12).hex())
        try:
            os.rename(path, name)
        except FileNotFoundError:
            continue
        aside.append(name)
    return aside


def remove_directory(directory: str) -> None:
    import shutil

    spill = _spill(directory)
    shutil.rmtree(directory, ignore_errors=True)
    if spill is not None and private.is_private(spill):
        remove_directory(spill)
    private.let_go(os.path.join(directory, _LOCK))


def directories(directory: str) -> list[str]:
    found = [directory]
    while (spill := _spill(found[-1])) is not None and private.is_private(spill):
        found.append(spill)
    return found


def _spill(directory: str) -> str | None:
    """Where blobs go when a directory is full, for every process of a pool on a machine."""
    try:
        return os.readlink(os.path.join(directory, _SPILL))
    except OSError:
        return None


def _new_spill(directory: str, full: Sequence[str]) -> str | None:
    """Makes that directory, with an unguessable name; a link in our own one leads to it."""
    import tempfile

    bases = [base for base in dict.fromkeys((tempfile.gettempdir(), *_DISKS)) if base not in full]
    if not bases:
        return None
    try:
        made = private.fresh(f"{os.path.basename(directory)}-", *bases)
    except private.NotPrivate:
        return None
    try:
        os.symlink(made, os.path.join(directory, _SPILL))
    except FileExistsError:  # another process was faster
        os.rmdir(made)
        return os.readlink(os.path.join(directory, _SPILL))
    except BaseException:
        os.rmdir(made)
        raise
    return made


def _further(directory: str, full: list[str]) -> str | None:
    full.append(os.path.dirname(directory))
    spill = _spill(directory) or _new_spill(directory, full)
    if spill is not None and not private.is_private(spill):
        raise PermissionError(errno.EACCES, "other users can write to the directory where blobs would go", spill)
    return spill


def _with_room(directory: str, size: int) -> str:
    """The first directory with room; the first one if none has."""
    full: list[str] = []
    place: str | None = directory
    while place is not None:
        free = os.statvfs(place)
        if not free.f_blocks or free.f_bavail * free.f_frsize >= size:  # without blocks there is no limit
            return place
        place = _further(place, full)
    return directory


def _sweep(base: Path) -> None:
    """Removes the directories of killed clients. One without a lock is still being made."""
    for path in base.glob("skyward-[0-9]*-*"):
        try:
            # in this order: a lock that is made meanwhile is seen as held
            unused = (path / _LOCK).exists() or time.time() - path.stat().st_mtime > _WEEK
            if not private.is_private(str(path)) or private.is_locked(path / _LOCK):
                continue
        except OSError:
            continue  # somebody else has removed it
        if unused:
            remove_directory(str(path))


def _made(directory: str, name: str, fill: Callable[[int], None]) -> tuple[str, int]:
    full: list[str] = []
    while True:
        try:
            return _made_in(directory, name, fill)
        except OSError as exc:
            if exc.errno not in FULL or (further := _further(directory, full)) is None:
                raise
            directory = further


def _made_in(directory: str, name: str, fill: Callable[[int], None]) -> tuple[str, int]:
    path = os.path.join(directory, name)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fill(fd)
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return path, fd


# The large pieces of what a body returns or yields, or takes from an iterator, as blobs: written once, or not at all.
#
# an argument that comes back unchanged    its blob gets a second name; nothing is written
# a tensor on a GPU                        is copied from there into the blob itself
# anything else                            is written


_SAMPLE = 4096
_STOWED = b"\x02"  # a head begins otherwise

Worded = Callable[[int], contextlib.AbstractContextManager[object]]


class Spill:
    """Blobs of one result; `arguments` came with the call. `worded(size)` explains why a file could not be made."""

    def __init__(
        self, directory: str, arguments: Iterable[tuple[str, int]] = (), worded: Worded = contextlib.nullcontext
    ) -> None:
        self._directory, self._arguments, self._worded = directory, arguments, worded
        self._drafts: dict[int, tuple[mmap.mmap, Blob]] = {}

    def __enter__(self) -> Spill:
        tensors.local.room = self.room
        return self

    def __exit__(self, *exc: object) -> None:
        tensors.local.room = None
        if self._drafts:
            remove(path for _, (path, _) in self._drafts.values())

    def room(self, size: int) -> memoryview:
        """Memory to fill; stored pieces of it are blobs already."""
        if size < LARGE:
            return memoryview(bytearray(size))
        with self._worded(size):
            mapped, blob = draft(self._directory, size)
        self._drafts[id(mapped)] = mapped, blob
        return memoryview(mapped)

    def store(self, pieces: list[Any]) -> dict[str, Blob]:
        """Moves large pieces into blobs, in place; returns their indices."""
        moved: dict[str, Blob] = {}
        try:
            for index, piece in enumerate(pieces):
                if nbytes(piece) >= LARGE:
                    moved[str(index)] = self._blob(piece)
                    pieces[index] = b""
        except BaseException:
            remove(path for path, _ in moved.values())
            raise
        return moved

    def _blob(self, piece: Any) -> Blob:
        view = memoryview(piece)
        draft = self._drafts.pop(id(view.obj), None)
        if draft is not None:
            return draft[1]
        return self._linked(view) or write(self._directory, view)

    def _linked(self, view: memoryview) -> Blob | None:
        """A second name of the argument with the same content."""
        for path, size in self._arguments:
            try:
                if size == view.nbytes and _is_content_of(path, view):
                    name = os.path.join(os.path.dirname(path), os.urandom(12).hex())
                    os.link(path, name)
                    return name, view.nbytes
            except OSError:
                continue  # it is gone, or the file system has no links: it is written
        return None


def stowed(pieces: list[Any], directory: str) -> list[Any]:
    """An item's pieces for a process of this computer: large ones as blobs, named in an extra first piece."""
    moved = Spill(directory).store(pieces)
    return [_STOWED + json.dumps(moved).encode(), *pieces] if moved else pieces


def fetched(pieces: list[Any]) -> list[Any]:
    moved = _stowed_in(pieces) if len(pieces) > 1 else {}
    if not moved:
        return pieces
    pieces = pieces[1:]
    for index, blob in moved.items():
        pieces[int(index)] = read(blob, unlink=True)
    return pieces


def size_of(pieces: list[Any]) -> int:
    if len(pieces) == 1:  # as most are, and small
        return nbytes(pieces[0])
    return sum(map(nbytes, pieces)) + sum(int(size) for _, size in _stowed_in(pieces).values())


def _stowed_in(pieces: list[Any]) -> dict[str, Sequence[Any]]:
    return json.loads(bytes(pieces[0][1:])) if pieces[0][:1] == _STOWED else {}


def _is_content_of(path: str, view: memoryview) -> bool:
    with open(path, "rb", buffering=0) as file:
        for at in (0, view.nbytes // 2, view.nbytes - _SAMPLE):  # most of what was changed, is changed there
            if os.pread(file.fileno(), _SAMPLE, at) != view[at : at + _SAMPLE].tobytes():
                return False
    return digest(view) == os.path.basename(path)
