"""Large buffers as files in a private directory, memory-mapped where they are used.

A blob is written once and read by every process of a machine without copying it; on tmpfs it never touches a disk.
Arguments are named by their content, so a repeated one is not written again; results by a random name, and their
reader removes them. The blobs of a result that is kept are named by its key (20 characters), the attempt (4) and the
index of the piece (4).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from skyward.transport import private
from skyward.transport.frames import Buffer

# fmt: off
__all__ = [
    "KEY", "LARGE", "SCRATCH", "Blob", "BlobIndex", "Store",
    "digest", "draft", "duplicate", "keep", "kept_names", "key_of", "make_directory", "read", "remove",
    "remove_directory", "room", "write", "write_piece",
]
# fmt: on

KEY = 20
LARGE = 1 << 20
SCRATCH = "SKYWARD_SCRATCH"
Blob = tuple[str, int]  # path and size

_RAM = Path("/dev/shm")
_SPILL = "more"


def write(directory: str, buffer: Buffer, name: str | None = None) -> Blob:
    """Writes a buffer into a directory of a store; falls back to disk when the memory file system is full."""
    view = memoryview(buffer).cast("B")

    def fill(fd: int) -> None:
        done = 0
        while done < view.nbytes:
            done += os.write(fd, view[done : done + (1 << 26)])

    path, file = _made(directory, name or os.urandom(12).hex(), fill)
    os.close(file)
    return path, view.nbytes


def draft(directory: str, size: int) -> tuple[mmap.mmap, Blob]:
    """A blob that is filled through memory, before anybody else knows of it."""
    name = os.urandom(12).hex()

    def allocate(fd: int) -> None:
        os.posix_fallocate(fd, 0, size)  # a lack of room is an error here, and a signal later

    path, file = _made(directory, name, allocate)
    try:
        return mmap.mmap(file, size), (path, size)
    finally:
        os.close(file)


def digest(buffer: Buffer) -> str:
    """The name of a content."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(buffer)


def write_piece(path: str, offset: int, data: Buffer) -> None:
    """Writes a part of a blob that arrives in pieces; the first one makes the file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if offset == 0 else 0)
    fd = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view.nbytes:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(fd)


def read(blob: Sequence[str | int], *, unlink: bool = False) -> memoryview:
    """The content of a blob; writable, changes stay private to the reader."""
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
    """Removes blobs; those already gone are no error."""
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def duplicate(path: str) -> str:
    """Another name for a blob; a copy of it, where the file system has no second names."""
    name = os.path.join(os.path.dirname(path), os.urandom(12).hex())
    try:
        os.link(path, name)
    except OSError:
        return write(os.path.dirname(path), read((path, os.path.getsize(path))))[0]
    return name


def make_directory() -> str:
    """A new private directory for blobs, in memory where possible; removed after this process has ended."""
    import tempfile  # not in runners

    bases = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    if _RAM.is_dir() and os.access(_RAM, os.W_OK):
        bases.insert(0, str(_RAM))
    _sweep(Path(bases[0]))
    # the directory of a pool inside another pool's body lies in that pool's directory, and is removed with it
    return private.fresh(f"skyward-{os.getpid()}-", *([inner] if (inner := os.environ.get(SCRATCH)) else bases))


def room(directory: str) -> int:
    """How many bytes of blobs a directory may hold: a quarter of what is free."""
    free = os.statvfs(directory)
    return max(LARGE, free.f_bavail * free.f_frsize // 4)


def key_of(name: str) -> str | None:
    """The key of the kept result that a blob belongs to; None if it is no part of one."""
    return name[:KEY] if len(name) == KEY + 8 else None


def kept_names(key: str, attempt: int, count: int) -> list[str]:
    """What the blobs of a kept result are called."""
    return [f"{key}{attempt:04x}{index:04x}" for index in range(count)]


def keep(directory: str, names: Sequence[str], pieces: Sequence[Buffer], moved: dict[str, Blob]) -> list[Blob]:
    """Makes a blob of each piece of a result; `moved` are those that are blobs already, by index."""
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
    """Which blobs lie in a directory, and how many calls need each. Those that no call needs go when room is short.

    Not thread-safe: its owner holds a lock. `limit` says how many bytes there may be.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._blobs: OrderedDict[str, Blob] = OrderedDict()  # least recently used first
        self._uses: Counter[str] = Counter()
        self._bytes = 0

    def get(self, name: str) -> Blob | None:
        """A blob that is there."""
        return self._blobs.get(name)

    def add(self, name: str, blob: Blob) -> None:
        """A blob is there now."""
        self._bytes += blob[1] - self._blobs.get(name, ("", 0))[1]
        self._blobs[name] = blob

    def use(self, names: Iterable[str]) -> None:
        """One more call needs these blobs, there or not."""
        for name in names:
            self._uses[name] += 1
            if name in self._blobs:
                self._blobs.move_to_end(name)

    def release(self, names: Iterable[str]) -> None:
        """A call no longer needs these blobs; they stay as long as there is room."""
        for name in names:
            self._uses[name] -= 1
            if self._uses[name] <= 0:
                del self._uses[name]

    def discard(self, names: Iterable[str]) -> None:
        """Removes blobs at once, unless a call needs them."""
        for name in names:
            if name not in self._uses and (blob := self._blobs.pop(name, None)) is not None:
                remove([blob[0]])
                self._bytes -= blob[1]

    def take_out(self, names: Iterable[str]) -> list[str]:
        """Where these blobs lay: they do not belong here any more."""
        gone = [blob for name in names if (blob := self._blobs.pop(name, None)) is not None]
        self._bytes -= sum(size for _, size in gone)
        return [path for path, _ in gone]

    def make_room(self) -> None:
        """Removes blobs that no call needs until the rest is within the limit."""
        limit = self._limit()
        if self._bytes <= limit:
            return
        for name, (path, size) in list(self._blobs.items()):
            if name not in self._uses:
                remove([path])
                del self._blobs[name]
                self._bytes -= size
                if self._bytes <= limit:
                    return


class Store:
    """The client's directory of blobs: arguments of calls, named by their content."""

    def __init__(self, limit: int | None = None) -> None:
        self.directory = make_directory()
        most = limit or room(self.directory)
        self._index = BlobIndex(lambda: most)
        self._lock = threading.Lock()

    def put(self, buffer: Buffer) -> tuple[str, Blob]:
        """Writes a buffer unless its content is there already, and keeps it until `release`."""
        name = digest(buffer)
        with self._lock:
            blob = self._index.get(name)
            if blob is None:
                blob = write(self.directory, buffer, name)
                self._index.add(name, blob)
            self._index.use([name])
            self._index.make_room()
            return name, blob

    def retain(self, digests: Iterable[str]) -> None:
        """Says that one more call needs these blobs."""
        with self._lock:
            self._index.use(digests)

    def discard(self, digests: Iterable[str]) -> None:
        """Says that a call no longer needs these blobs, and removes those that no other call needs."""
        names = list(digests)
        with self._lock:
            self._index.release(names)
            self._index.discard(names)

    def release(self, digests: Iterable[str]) -> None:
        """Says that a call no longer needs these blobs; they stay as long as there is room."""
        with self._lock:
            self._index.release(digests)
            self._index.make_room()

    def close(self) -> None:
        """Removes the directory and everything in it."""
        remove_directory(self.directory)


def remove_directory(directory: str) -> None:
    """Removes a store's directory, and the one on disk that it may have spilled into."""
    import shutil

    spill = _spill(directory)
    shutil.rmtree(directory, ignore_errors=True)
    if spill is not None and private.is_private(spill):
        shutil.rmtree(spill, ignore_errors=True)


def _spill(directory: str) -> str | None:
    """Where blobs go when a directory has no more room, for every process of a pool on a machine; None until then."""
    try:
        return os.readlink(os.path.join(directory, _SPILL))
    except OSError:
        return None


def _new_spill(directory: str) -> str:
    """Makes that directory, with a name that nobody can have guessed; a link in our own one leads to it."""
    made = private.fresh(f"{os.path.basename(directory)}-")
    try:
        os.symlink(made, os.path.join(directory, _SPILL))
    except FileExistsError:  # another process was faster
        os.rmdir(made)
        return os.readlink(os.path.join(directory, _SPILL))
    except BaseException:
        os.rmdir(made)
        raise
    return made


def _sweep(base: Path) -> None:
    """Removes the directories of pools whose client was killed and could not clean up."""
    for path in base.glob("skyward-[0-9]*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and private.is_private(str(path)):
            remove_directory(str(path))


def _made(directory: str, name: str, fill: Callable[[int], None]) -> tuple[str, int]:
    """A new file with what `fill` puts into it, open; on disk when the memory file system is full."""
    try:
        return _made_in(directory, name, fill)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
    spill = _spill(directory) or _new_spill(directory)
    if not private.is_private(spill):
        raise PermissionError(errno.EACCES, "others have a hand in the directory where blobs would go", spill)
    return _made_in(spill, name, fill)


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
