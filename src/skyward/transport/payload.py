"""From Python objects to bytes and back: cloudpickle, protocol 5, buffers out of band.

Modules that exist only here travel by value, others by name.
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
from typing import TYPE_CHECKING, Any, ClassVar, cast

import cloudpickle

from skyward.errors import FilesLost, NodeDiskFull, NotSerializable
from skyward.transport import blobs, tensors
from skyward.transport.blobs import LARGE

if TYPE_CHECKING:
    from skyward.transport.classes import Classes

__all__ = [
    "Packed",
    "Packer",
    "Pickler",
    "PieceWriter",
    "bytearray_of",
    "bytes_of",
    "is_by_value",
    "names_in",
    "pack_plain",
    "split",
    "unpack",
]


_CONSTANT = frozenset({int, float, str, bytes, bool, type(None), ModuleType, CodeType, BuiltinFunctionType})
_SIMPLE = frozenset({int, float, str, bytes, bool, type(None), complex, range})
_LONG = frozenset({str, bytes})
_SHORTS = _SIMPLE - _LONG
_KEYS = frozenset({str, int, bool})
_SHORT = 1 << 20
_OURS = ("skyward.", "cloudpickle.")
_PACKAGES = ("/site-packages/", "/dist-packages/")  # of any environment: one may be laid over another
_EVERYWHERE = frozenset({"__main__", "__mp_main__", "skyward", "cloudpickle"})
_MOST_CHECKED = 1000  # parts of a value that are looked at one by one; beyond that, cloudpickle is as fast
_MOST_CODES = 4096
_CARE = (b"_make_skeleton", b"_load_from_bytes")


class Packer:
    def __init__(self, roots: Iterable[str] = ()) -> None:
        self._roots = tuple(dict.fromkeys([*_environment_roots(), *(str(Path(r).resolve()) for r in roots if r)]))
        self._known: dict[str, tuple[ModuleType, bool]] = {}  # modules that were asked for, whether they are foreign
        self._functions: weakref.WeakKeyDictionary[FunctionType, tuple[tuple[object, ...], Packed]] = (
            weakref.WeakKeyDictionary()
        )
        self._classes: Classes | None = None

    def pack(self, value: object, what: str) -> Packed:
        if (plain := self.pack_simple(value)) is not None:
            return plain
        if self._classes is None:
            from skyward.transport.classes import Classes  # agents load this file, and never pickle

            self._classes = Classes(lambda cls: _cloudpickle(cls)[0])
        return self._pickled(value, what, self._classes)

    def _pickled(self, value: object, what: str, classes: Classes | None) -> Packed:
        try:
            with _by_value(self):
                return _cloudpickle(value, classes)
        except (NotSerializable, NodeDiskFull, FilesLost):  # of a file for what leaves a GPU
            raise
        except Exception as exc:  # whatever a user's __reduce__ raises: reported with the path, never swallowed
            raise NotSerializable(self.explain(value, what, exc)) from exc

    def pack_simple(self, value: object) -> Packed | None:
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
        """As `pack`; a function that refers only to constants is pickled once."""
        # a function may change what its classes see of the module, so they share that with it
        constants = _constants_of(fn) if isinstance(fn, FunctionType) else None
        if constants is None or not isinstance(fn, FunctionType):
            return self._pickled(fn, what, None)
        known = self._functions.get(fn)
        if known is not None and len(known[0]) == len(constants) and all(map(operator.is_, known[0], constants)):
            return known[1]
        packed = self._pickled(fn, what, None)
        self._functions[fn] = (constants, packed)
        return packed

    def explain(self, value: object, what: str, exc: BaseException) -> str:
        with _by_value(self):
            # here and below: agents load this file, and never pickle
            from skyward.transport.pickle_errors import explain

            return explain(value, what, exc, _cloudpickle)

    def is_foreign(self, module: ModuleType) -> bool:
        """Whether only this process has the module, or its package."""
        name = module.__name__
        known = self._known.get(name)
        if known is None or known[0] is not module:  # or it was loaded again from its file
            foreign = name not in _EVERYWHERE and not name.startswith(_OURS) and self._is_outside(module)
            parent = None if foreign else sys.modules.get(name.rpartition(".")[0])
            known = self._known[name] = module, foreign or (parent is not None and self.is_foreign(parent))
        return known[1]

    def _is_outside(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        if file is None:
            # a module made at run time; built-in ones and namespace packages have a spec
            return getattr(module, "__spec__", None) is None and module.__name__ not in sys.builtin_module_names
        return self.is_foreign_file(file)

    def is_foreign_file(self, file: str) -> bool:
        path = str(Path(file).resolve())
        if any(name in file or name in path for name in _PACKAGES):
            return False
        return path.endswith((".py", ".pyc", ".ipynb")) and not any(_inside(path, root) for root in self._roots)


def pack_plain(value: object) -> Packed:
    out = PieceWriter()
    if len(tensors.TABLE) == 1:  # no framework is loaded: one call is a seventh of the cost
        head = pickle.dumps(value, 5, buffer_callback=out.buffer)
    else:
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5, buffer_callback=out.buffer)
        pickler.dispatch_table = tensors.TABLE
        pickler.dump(value)
        head = file.getvalue()
    return (head, []) if out.is_empty else out.packed(head)


def unpack(head: bytes | memoryview, buffers: Sequence[Any], *, keep_classes: bool = False) -> Any:
    """Buffers may be memory-mapped. With `keep_classes`, a class that this process sent by value comes back as itself,
    and tensors on GPUs that this computer lacks come to the CPU.
    """
    head, buffers = split(head, buffers)
    if not keep_classes:
        return pickle.loads(head, buffers=buffers)
    short = b"" if len(head) > _SHORT else head if type(head) is bytes else bytes(head)
    if not short or _CARE[0] in short or _CARE[1] in short:
        return _Keeping(_View(memoryview(head)), buffers=buffers).load()
    return pickle.loads(short, buffers=buffers)


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
    """Keeps classes that this process knows, which cloudpickle would overwrite."""

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
        if module == "skyward.transport.classes" and name == "load_class":
            return functools.partial(found, loads=_load_keeping)
        return _load_storage if (module, name) == ("torch.storage", "_load_from_bytes") else found

    def _skeleton(self, make: Callable[..., type], *args: Any) -> type:
        before = set(cast("Iterable[str]", cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID))  # pyright: ignore[reportPrivateUsage] - the only way to know
        made = make(*args)
        if any(arg in before for arg in args if isinstance(arg, str)):
            self._own.add(id(made))
        return made

    def _set_state(self, set_state: Callable[..., Any], cls: type, state: Any) -> Any:
        return cls if id(cls) in self._own else set_state(cls, state)


def _load_keeping(data: bytes) -> Any:
    return _Keeping(io.BytesIO(data)).load()


def _load_storage(data: bytes) -> Any:
    torch = importlib.import_module("torch")
    return torch.load(io.BytesIO(data), map_location=None if torch.cuda.is_available() else "cpu", weights_only=False)


_type: Callable[[Any], Any] = type
_as_cloudpickle: Any = cast(Any, cloudpickle.Pickler).reducer_override


class Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap(tensors.TABLE, *cast(Any, cloudpickle.Pickler).dispatch_table.maps)

    def __init__(
        self,
        file: Any,
        buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
        classes: Classes | None = None,
    ) -> None:
        from skyward.transport.definitions import KINDS, reduce

        tensors.note_loaded_frameworks()
        self._kinds, self._reduce, self._classes = KINDS, reduce, classes
        cast(Any, super()).__init__(file, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        kind = _type(obj)
        if kind is type and self._classes is not None and (sent := self._classes.reduced(obj)) is not None:
            return sent
        made = self._reduce(obj) if kind in self._kinds else NotImplemented
        if made is not NotImplemented:
            return made
        if kind is FunctionType:
            _remember(obj.__code__)
        return _as_cloudpickle(self, obj)


_codes: dict[CodeType, None] = {}


def _remember(code: CodeType) -> None:
    """cloudpickle keys globals by code object, which is new on a node each time: reuses those of equal code."""
    if code not in _codes:
        if len(_codes) >= _MOST_CODES:
            _codes.clear()
        _codes[code] = None


def _cloudpickle(value: object, classes: Classes | None = None) -> Packed:
    out = PieceWriter()
    cast(Any, Pickler(out, out.buffer, classes)).dump(value)
    return out.packed()


def _is_simple(value: object) -> bool:
    left, waiting = _MOST_CHECKED, [value]
    while waiting:
        given: Any = waiting.pop()
        kind = _type(given)
        if kind in _SHORTS:
            continue
        if kind in _LONG:
            if len(given) >= LARGE:
                return False
            continue
        if kind is dict:
            if not _KEYS.issuperset(map(type, given)):
                return False
            given = given.values()
        elif kind is not tuple and kind is not list:
            if not tensors.is_plain(given):
                return False
            continue
        kinds = set(map(type, given))
        if kinds <= _SHORTS or (kinds <= _LONG and max(map(len, given)) < LARGE):
            continue
        left -= len(given)
        if left < 0:
            return False
        waiting += given
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


class _Now(threading.local):
    packer: Packer | None = None


_now = _Now()


def is_by_value(module: str) -> bool:
    """Whether the user registered a module with cloudpickle."""
    return any(module == name or module.startswith(f"{name}.") for name in _registry)


class _by_value:
    """While open, this thread pickles foreign modules by value."""

    __slots__ = ("_before", "_packer")

    def __init__(self, packer: Packer) -> None:
        self._packer = packer

    def __enter__(self) -> None:
        self._before, _now.packer = _now.packer, self._packer

    def __exit__(self, *exc: object) -> None:
        _now.packer = self._before


def _travels_by_value(module: ModuleType) -> bool:
    packer = _now.packer
    return (packer is not None and packer.is_foreign(module)) or (bool(_registry) and _is_registered(module))


# Asked module by module. Its own way, a set of names, takes longer the more modules a program has, and is the
# process's: only one thread could pickle.
_internals: Any = cast(Any, cloudpickle).cloudpickle
_registry: set[str] = _internals._PICKLE_BY_VALUE_MODULES
_is_registered: Callable[[ModuleType], bool] = _internals._is_registered_pickle_by_value
_internals._is_registered_pickle_by_value = _travels_by_value


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    from skyward.transport.pickle_errors import names

    return tuple(names(code))


def _constants_of(fn: FunctionType) -> tuple[object, ...] | None:
    """All that a function refers to, or None if something is no constant."""
    if fn.__closure__ or fn.__kwdefaults__ or fn.__dict__:
        return None
    scope = fn.__globals__
    found = (fn.__code__, *(fn.__defaults__ or ()), *(scope[name] for name in names_in(fn.__code__) if name in scope))
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
    """An unpickler asks for a buffer only once it has memory for it."""
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
        """True if it stays in the pickle: small or not contiguous."""
        try:
            raw = buffer.raw()
        except BufferError:
            return True
        if raw.nbytes < tensors.INLINE:
            return True
        self._buffers.append(raw)
        self._kinds.append(_BUFFER)
        return False

    @property
    def is_empty(self) -> bool:
        return not self._buffers

    def packed(self, head: bytes = b"") -> Packed:
        """`head` if the pickle is there already."""
        if head:
            self._stream = [head]
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
