"""From Python objects to bytes and back: cloudpickle, protocol 5, buffers out of band.

What a function refers to in modules that exist only here travels by value; what the environment holds on both sides
travels by name. What cannot travel is named by the path that leads to it.
"""

from __future__ import annotations

import functools
import importlib
import io
import mmap
import operator
import pickle
import site
import struct
import sys
import sysconfig
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, cast

import cloudpickle

from skyward.errors import FilesLost, NodeDiskFull, NotSerializable
from skyward.transport import blobs, tensors
from skyward.transport.blobs import LARGE

__all__ = [
    "Packed",
    "Packer",
    "Pickler",
    "PieceWriter",
    "bytearray_of",
    "bytes_of",
    "is_by_value",
    "pack_plain",
    "split",
    "unpack",
]


_CONSTANT = frozenset({int, float, str, bytes, bool, type(None), ModuleType, CodeType, BuiltinFunctionType})
_SIMPLE = frozenset({int, float, str, bytes, bool, type(None), complex, range})
_LONG = frozenset({str, bytes})
_SHORTS = _SIMPLE - _LONG
_TEXT = frozenset({str})
_SHORT = 1 << 20
_OURS = ("skyward.", "cloudpickle.")
_CARE = (b"_make_skeleton", b"_load_from_bytes")


class Packer:
    def __init__(self, roots: Iterable[str] = ()) -> None:
        self._roots = tuple(dict.fromkeys([*_environment_roots(), *(str(Path(r).resolve()) for r in roots if r)]))
        self._checked: set[str] = {"__main__", "__mp_main__", "skyward", "cloudpickle"}  # both are on every node
        self._foreign: dict[str, ModuleType] = {}
        self._names: frozenset[str] = frozenset()
        self._seen: tuple[int, str] = (0, "")
        self._functions: weakref.WeakKeyDictionary[FunctionType, tuple[tuple[object, ...], Packed]] = (
            weakref.WeakKeyDictionary()
        )

    def pack(self, value: object, what: str) -> Packed:
        if (plain := self.pack_simple(value)) is not None:
            return plain
        try:
            with _by_value(self._foreign_modules()):
                return _cloudpickle(value)
        except (NotSerializable, NodeDiskFull, FilesLost):  # of a file for what leaves a GPU
            raise
        except Exception as exc:  # whatever a user's __reduce__ raises: reported with the path, never swallowed
            raise NotSerializable(self.explain(value, what, exc)) from exc

    def pack_simple(self, value: object) -> Packed | None:
        """Bytes for a plain value, in which there is nothing that stays here or on nodes; None for all others."""
        if not _is_simple(value):
            return None
        try:
            return pack_plain(value)
        except Exception:  # an array that was deleted, for example: `pack` meets it again, and says where it is
            return None

    def pack_small(self, value: object) -> bytes | None:
        head, buffers = self.pack_simple(value) or (b"", ())
        return head if head and not buffers and len(head) < blobs.LARGE else None

    def pack_function(self, fn: object, what: str) -> Packed:
        """As `pack`; a function that refers to nothing but constants is pickled once and then known by them."""
        if not isinstance(fn, FunctionType):
            return self.pack(fn, what)
        constants = _constants_of(fn)
        if constants is None:
            return self.pack(fn, what)
        known = self._functions.get(fn)
        if known is not None and len(known[0]) == len(constants) and all(map(operator.is_, known[0], constants)):
            return known[1]
        packed = self.pack(fn, what)
        self._functions[fn] = (constants, packed)
        return packed

    def explain(self, value: object, what: str, exc: BaseException) -> str:
        with _by_value(self._foreign_modules()):
            from skyward.transport.culprits import explained  # here and below: agents load this file, and never pickle

            return explained(value, what, exc, _cloudpickle)

    def _foreign_modules(self) -> frozenset[str]:
        """The names of the modules that only this process has: thousands in some programs, so no loop per call."""
        state = (len(sys.modules), next(reversed(sys.modules)))
        if state == self._seen and self._foreign.items() <= sys.modules.items():
            return self._names  # nothing was imported since, taken out, or loaded again from its file
        with _registry_lock:
            kept = {name: module for name, module in self._foreign.items() if sys.modules.get(name) is module}
            self._checked -= self._foreign.keys() - kept.keys()
            for name in sys.modules.keys() - self._checked:
                module = sys.modules.get(name)
                if isinstance(module, ModuleType) and not name.startswith(_OURS) and self.is_foreign(module):
                    kept[name] = module
                self._checked.add(name)
            # one module may be known by two names (expat's are), and is registered by its own
            self._names = frozenset(module.__name__ for module in kept.values())
            self._foreign, self._seen = kept, state  # replaced, not changed: other threads compare it without the lock
        return self._names

    def is_foreign(self, module: ModuleType) -> bool:
        """Whether only this process has the module: its file lies outside the environment."""
        file = getattr(module, "__file__", None)
        if file is None:
            # a module made at run time; built-in ones and namespace packages have a spec
            return getattr(module, "__spec__", None) is None and module.__name__ not in sys.builtin_module_names
        return self.is_foreign_file(file)

    def is_foreign_file(self, file: str) -> bool:
        path = str(Path(file).resolve())
        return path.endswith((".py", ".pyc", ".ipynb")) and not any(_inside(path, root) for root in self._roots)


def pack_plain(value: object) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    if len(tensors.TABLE) == 1:  # no framework is loaded: one call is a seventh of the cost
        head = pickle.dumps(value, 5, buffer_callback=buffers.append)
    else:
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = tensors.TABLE
        pickler.dump(value)
        head = file.getvalue()
    if not buffers:
        return head, []
    out = PieceWriter()
    out.write(head)
    for buffer in buffers:
        out.buffer(buffer)
    return out.packed()


def unpack(head: bytes | memoryview, buffers: Sequence[Any], *, keep_classes: bool = False) -> Any:
    """The object again; buffers may be memory-mapped and are used without copying.

    With `keep_classes`, a class that this process sent by value comes back as the class of this process, not as a copy,
    and tensors on GPUs that this computer does not have come to the CPU.
    """
    head, buffers = split(head, buffers)
    if keep_classes and (len(head) > _SHORT or _needs_care(bytes(head))):
        return _Keeping(_View(memoryview(head)), buffers=buffers).load()
    return pickle.loads(head, buffers=buffers)


def _needs_care(head: bytes) -> bool:
    return _CARE[0] in head or _CARE[1] in head


class _View(io.RawIOBase):
    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        size = min(len(target), len(self._view) - self._at)
        target[:size] = self._view[self._at : self._at + size]
        self._at += size
        return size


class _Keeping(pickle.Unpickler):
    """Leaves classes that this process knows as they are: cloudpickle would overwrite them with the sender's copy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own: set[int] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(self._skeleton, found)
            if name == "_class_setstate":
                return functools.partial(self._set_state, found)
        return _load_storage if (module, name) == ("torch.storage", "_load_from_bytes") else found

    def _skeleton(self, make: Callable[..., type], *args: Any) -> type:
        before = set(cast("Iterable[str]", cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID))  # pyright: ignore[reportPrivateUsage] - the only way to know
        made = make(*args)
        if any(arg in before for arg in args if isinstance(arg, str)):
            self._own.add(id(made))
        return made

    def _set_state(self, set_state: Callable[..., Any], cls: type, state: Any) -> Any:
        return cls if id(cls) in self._own else set_state(cls, state)


def _load_storage(data: bytes) -> Any:
    torch = importlib.import_module("torch")
    return torch.load(io.BytesIO(data), map_location=None if torch.cuda.is_available() else "cpu", weights_only=False)


_as_cloudpickle: Any = cast(Any, cloudpickle.Pickler).reducer_override


class Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap(tensors.TABLE, *cast(Any, cloudpickle.Pickler).dispatch_table.maps)

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None) -> None:
        from skyward.transport.definitions import KINDS, reduce

        tensors.look_around()
        self._kinds, self._reduce = KINDS, reduce
        cast(Any, super()).__init__(file, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        made = self._reduce(obj) if type(obj) in self._kinds else NotImplemented
        return _as_cloudpickle(self, obj) if made is NotImplemented else made


def _cloudpickle(value: object) -> Packed:
    out = PieceWriter()
    cast(Any, Pickler(out, out.buffer)).dump(value)
    return out.packed()


def _is_simple(value: object, depth: int = 4) -> bool:
    if depth == 0:
        return False
    kind = type(value)
    if kind in _SIMPLE:
        return kind not in _LONG or len(cast("bytes | str", value)) < blobs.LARGE
    given: Any = value
    if kind is dict:
        if not _TEXT.issuperset(map(type, given)):
            return False
        given = given.values()
    elif kind is not tuple and kind is not list:
        return tensors.is_plain(value)
    if len(given) > 64 or (given and depth == 1):
        return _SHORTS.issuperset(map(type, given))
    for item in given:  # noqa: SIM110 - done for every call, and a generator takes longer
        if type(item) not in _SHORTS and not _is_simple(item, depth - 1):
            return False
    return True


@functools.cache
def _environment_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = [paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += site.getsitepackages() if hasattr(site, "getsitepackages") else []
    roots.append(site.getusersitepackages())
    return tuple(dict.fromkeys(str(Path(r).resolve()) for r in roots))


def _inside(path: str, root: str) -> bool:
    return path.startswith(root.rstrip("/") + "/")


_registry_lock = threading.RLock()
# cloudpickle's own set: its functions take one module at a time, which takes long for thousands of them
_registry: set[str] = cast(Any, cloudpickle).cloudpickle._PICKLE_BY_VALUE_MODULES


def is_by_value(module: str) -> bool:
    """Whether the user has registered a module, or a package that it is in, with cloudpickle."""
    return any(module == name or module.startswith(f"{name}.") for name in _registry)


class _by_value:
    """While open, cloudpickle sends modules of these names by value; the user's own registrations stay as they are."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        _registry_lock.acquire()
        self._added = self._names - _registry
        _registry.update(self._added)

    def __exit__(self, *exc: object) -> None:
        _registry.difference_update(self._added)
        _registry_lock.release()


@functools.lru_cache(maxsize=4096)
def _all_names(code: CodeType) -> tuple[str, ...]:
    from skyward.transport.culprits import names

    return tuple(names(code))


def _constants_of(fn: FunctionType) -> tuple[object, ...] | None:
    """All that a function refers to, if each is a constant; else None, for it may change without our knowing."""
    if fn.__closure__ or fn.__kwdefaults__ or fn.__dict__:
        return None
    scope = fn.__globals__
    found = (fn.__code__, *(fn.__defaults__ or ()), *(scope[name] for name in _all_names(fn.__code__) if name in scope))
    return found if _CONSTANT.issuperset(map(type, found)) else None


# Large `bytes` and `bytearray` out of a buffer, in huge pages where the kernel has them: three times as fast.
#
# These own their memory, so a copy cannot be avoided; most of its time goes into getting the memory page by page.


_WORTH_IT = 8 << 20
_HUGE = 2 << 20


def bytes_of(buffer: Any) -> bytes:
    if type(buffer) is bytes:
        return buffer
    return _unpickled(pickle.BINBYTES8, buffer) if _is_worth_it(buffer) else bytes(buffer)


def bytearray_of(buffer: Any) -> bytearray:
    return _unpickled(pickle.BYTEARRAY8, buffer) if _is_worth_it(buffer) else bytearray(buffer)


def _is_worth_it(buffer: Any) -> bool:
    return sys.platform == "linux" and memoryview(buffer).nbytes >= _WORTH_IT


def _unpickled(opcode: bytes, buffer: Any) -> Any:
    """What the opcode makes of a buffer: an unpickler asks for its content when it has memory for it, and no sooner."""
    return pickle.Unpickler(_Pickle(opcode, memoryview(buffer))).load()


class _Pickle(io.RawIOBase):
    def __init__(self, opcode: bytes, content: memoryview) -> None:
        self._content = content
        self._rest = [pickle.STOP, opcode + struct.pack("<Q", content.nbytes), pickle.PROTO + b"\x05"]

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        part = self._rest.pop()
        if len(part) > size:
            self._rest.append(part[size:])
        return part[:size]

    def readinto(self, target: Any, /) -> int:
        _prefer_huge_pages(target)
        target[:] = self._content
        return len(target)


def _prefer_huge_pages(memory: memoryview) -> None:
    import ctypes  # takes longer than all the rest of a runner

    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start, end = -(-first // _HUGE) * _HUGE, (first + memory.nbytes) // _HUGE * _HUGE
    _madvise()(start, end - start, mmap.MADV_HUGEPAGE)  # advice: if it is not taken, nothing is wrong


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    import ctypes

    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


# A pickle and its buffers as few pieces: what is large stands alone and is not copied, what is small is joined.
#
#     pickler ──frame──► write ──┐ small parts are joined            ┌► head: layout, then the small parts
#             ──100 MB─► write ──┤ large ones become buffers         ├► buffers: the large ones, each as it is,
#             ──buffer─► buffer ─┘ small buffers become one together └►          before them one of all small ones
#
# A pickler hands large bytes, bytearrays and texts to its file as they are, outside its frames. They are replaced by
# the opcode that takes the next buffer, so what is left is an ordinary pickle, and the layout says which buffers to
# turn into bytes, bytearrays and texts first. A head without a layout has buffers that are used as they are. Whoever
# moves pieces about knows a head and buffers, and nothing of this.


Packed = tuple[bytes, list[memoryview]]

_MARK = 0x01  # a pickle begins with 0x80
_START = struct.Struct("!BI?")  # the mark, the number of buffers of the pickle, whether small ones were joined
_MANY = 256  # more small buffers than this are joined: a frame holds many values, and takes only so many buffers
_ALIGNED = 64  # what torch and XLA expect of memory that they use without a copy
_BUFFER, _BYTES, _BYTEARRAY, _PIECES_TEXT = range(4)
_OPCODES = {  # what stands before a large part: the opcode and its length
    _BYTES: (struct.Struct("<cI"), pickle.BINBYTES, struct.Struct("<cQ"), pickle.BINBYTES8),
    _PIECES_TEXT: (struct.Struct("<cI"), pickle.BINUNICODE, struct.Struct("<cQ"), pickle.BINUNICODE8),
    _BYTEARRAY: (struct.Struct("<cQ"), pickle.BYTEARRAY8, struct.Struct("<cQ"), pickle.BYTEARRAY8),
}


class PieceWriter:
    def __init__(self) -> None:
        self._stream: list[bytes] = []
        self._buffers: list[memoryview] = []
        self._kinds = bytearray()

    def write(self, data: Any) -> None:
        part = data if type(data) is bytes else memoryview(data).cast("B")
        if len(part) >= LARGE and self._stream:
            before = self._stream[-1]
            for kind, header in _headers(len(part)):
                if before.endswith(header):
                    self._stream[-1] = before[: -len(header)] + pickle.NEXT_BUFFER
                    self._buffers.append(memoryview(part))
                    self._kinds.append(kind)
                    return
        self._stream.append(bytes(part))

    def buffer(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            self._buffers.append(buffer.raw())
        except BufferError:
            return True
        self._kinds.append(_BUFFER)
        return False

    def packed(self) -> Packed:
        small = [buffer for buffer in self._buffers if buffer.nbytes < LARGE]
        join = len(small) > _MANY or (len(small) > 1 and sum(buffer.nbytes for buffer in small) >= LARGE)
        if not join and not any(self._kinds):
            return b"".join(self._stream), self._buffers
        sizes = struct.pack(f"!{len(self._buffers)}Q", *(buffer.nbytes for buffer in self._buffers))
        head = b"".join((_START.pack(_MARK, len(self._kinds), join), self._kinds, sizes, *self._stream))
        if not join:
            return head, self._buffers
        return head, [_joined(small), *(buffer for buffer in self._buffers if buffer.nbytes >= LARGE)]


def split(head: bytes | memoryview, buffers: Sequence[Any]) -> tuple[bytes | memoryview, Sequence[Any]]:
    if not len(head) or head[0] != _MARK:
        return head, buffers
    view = memoryview(head)
    _, count, join = _START.unpack_from(view)
    kinds = view[_START.size : _START.size + count]
    sizes = struct.unpack_from(f"!{count}Q", view, _START.size + count)
    apart = _apart(sizes, memoryview(buffers[0]), buffers[1:]) if join else buffers
    return view[_START.size + 9 * count :], [_made(kind, buffer) for kind, buffer in zip(kinds, apart, strict=True)]


def _headers(size: int) -> list[tuple[int, bytes]]:
    wide = size > 0xFFFFFFFF
    return [
        (kind, long.pack(long_code, size) if wide else short.pack(short_code, size))
        for kind, (short, short_code, long, long_code) in _OPCODES.items()
    ]


def _made(kind: int, buffer: Any) -> Any:
    if kind == _BYTES:
        return bytes_of(buffer)
    if kind == _BYTEARRAY:
        return bytearray_of(buffer)
    return str(buffer, "utf-8", "surrogatepass") if kind == _PIECES_TEXT else buffer


def _joined(small: Sequence[memoryview]) -> memoryview:
    whole = memoryview(bytearray(sum(_room(buffer.nbytes) for buffer in small)))
    at = 0
    for buffer in small:
        whole[at : at + buffer.nbytes] = buffer
        at += _room(buffer.nbytes)
    return whole


def _apart(sizes: Sequence[int], joined: memoryview, alone: Sequence[Any]) -> list[Any]:
    others, at = iter(alone), 0
    buffers: list[Any] = []
    for size in sizes:
        if size >= LARGE:
            buffers.append(next(others))
        else:
            buffers.append(joined[at : at + size])
            at += _room(size)
    return buffers


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
