"""From Python objects to bytes and back: cloudpickle, protocol 5, buffers out of band.

What a function refers to in modules that exist only here travels by value; what the environment holds on both sides
travels by name. What cannot travel is named by the path that leads to it.
"""

from __future__ import annotations

import functools
import importlib
import io
import operator
import pickle
import site
import sys
import sysconfig
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, cast

import cloudpickle

from skyward.errors import NotSerializable
from skyward.transport import blobs, tensors
from skyward.transport.pieces import Packed, PieceWriter, split

__all__ = ["Packed", "Packer", "Pickler", "pack_plain", "unpack"]

_CONSTANT = frozenset({int, float, str, bytes, bool, type(None), ModuleType, CodeType, BuiltinFunctionType})
_SIMPLE = frozenset({int, float, str, bytes, bool, type(None), complex, range})
_LONG = frozenset({str, bytes})
_SHORTS = _SIMPLE - _LONG
_TEXT = frozenset({str})
_SHORT = 1 << 20
_OURS = ("skyward.", "cloudpickle.")
_CARE = (b"_make_skeleton", b"_load_from_bytes")


class Packer:
    """Packs functions, arguments and results; knows which modules the other side has."""

    def __init__(self, roots: Iterable[str] = ()) -> None:
        self._roots = tuple(dict.fromkeys([*_environment_roots(), *(str(Path(r).resolve()) for r in roots if r)]))
        self._checked: set[str] = {"__main__", "__mp_main__", "skyward", "cloudpickle"}  # both are on every node
        self._foreign: dict[str, ModuleType] = {}
        self._seen: tuple[int, str] = (0, "")
        self._functions: weakref.WeakKeyDictionary[FunctionType, tuple[tuple[object, ...], Packed]] = (
            weakref.WeakKeyDictionary()
        )

    def pack(self, value: object, what: str) -> Packed:
        """Bytes for `value`, called `what` in errors; raises NotSerializable naming the part that cannot travel."""
        if _is_simple(value):
            return pack_plain(value)
        try:
            with _by_value(self._foreign_modules()):
                return _cloudpickle(value)
        except NotSerializable:
            raise
        except Exception as exc:  # whatever a user's __reduce__ raises: reported with the path, never swallowed
            raise NotSerializable(self.explain(value, what, exc)) from exc

    def pack_simple(self, value: object) -> Packed | None:
        """Bytes for a plain value, in which there is nothing that stays here or on nodes; None for all others."""
        return pack_plain(value) if _is_simple(value) else None

    def pack_small(self, value: object) -> bytes | None:
        """Bytes for a plain value that fits into a message; None for all others."""
        if not _is_simple(value):
            return None
        head, buffers = pack_plain(value)
        return None if buffers or len(head) >= blobs.LARGE else head

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
        """Why `value` cannot travel, with the path to the part that is to blame."""
        with _by_value(self._foreign_modules()):
            from skyward.transport.culprits import explained  # here and below: agents load this file, and never pickle

            return explained(value, what, exc, _cloudpickle)

    def _foreign_modules(self) -> dict[str, ModuleType]:
        state = (len(sys.modules), next(reversed(sys.modules)))
        stale = [name for name, module in list(self._foreign.items()) if sys.modules.get(name) is not module]
        if state == self._seen and not stale:
            return self._foreign  # nothing was imported since
        with _registry_lock:
            for name in stale:  # taken out, or loaded again from its file
                self._foreign.pop(name, None)
                self._checked.discard(name)
            for name in sys.modules.keys() - self._checked:
                module = sys.modules.get(name)
                if isinstance(module, ModuleType) and not name.startswith(_OURS) and self._is_foreign(module):
                    self._foreign[name] = module
                self._checked.add(name)
            self._seen = state
        return self._foreign

    def _is_foreign(self, module: ModuleType) -> bool:
        """Whether only this process has the module: its file lies outside the environment."""
        file = getattr(module, "__file__", None)
        if file is None:
            # a module made at run time; built-in ones and namespace packages have a spec
            return getattr(module, "__spec__", None) is None and module.__name__ not in sys.builtin_module_names
        path = str(Path(file).resolve())
        return path.endswith((".py", ".pyc", ".ipynb")) and not any(_inside(path, root) for root in self._roots)


def pack_plain(value: object) -> Packed:
    """Bytes for a value that needs none of cloudpickle's care, and has nothing large in it but arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, 5, buffer_callback=buffers.append)
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
    """A buffer as a file, read without copying it first."""

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
    """What torch has on a node's GPU, on the CPU where this computer has none."""
    torch = importlib.import_module("torch")
    return torch.load(io.BytesIO(data), map_location=None if torch.cuda.is_available() else "cpu", weights_only=False)


_as_cloudpickle: Any = cast(Any, cloudpickle.Pickler).reducer_override


class Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler, by which tensors leave their memory out of band too."""

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
    """Whether the C pickler alone does: plain values and shallow containers of them."""
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
        return kind.__module__ == "numpy" and kind.__name__ == "ndarray" and _is_plain(value)
    if len(given) > 64 or (given and depth == 1):
        return False
    for item in given:  # noqa: SIM110 - done for every call, and a generator takes longer
        if type(item) not in _SHORTS and not _is_simple(item, depth - 1):
            return False
    return True


def _is_plain(array: Any) -> bool:
    """Whether numpy leaves the array's memory out of band by itself."""
    flags, dtype = array.flags, array.dtype
    return (flags.c_contiguous or flags.f_contiguous) and not dtype.hasobject and dtype.isbuiltin != 2


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


class _by_value:
    """While open, cloudpickle sends the given modules by value; the user's own registrations stay as they are."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = modules
        self._added: list[ModuleType] = []

    def __enter__(self) -> None:
        _registry_lock.acquire()
        registered = cast("set[str]", cloudpickle.list_registry_pickle_by_value())
        for name, module in list(self._modules.items()):
            # one module may be known by two names (expat's are), and is registered by its own
            known = name in registered or module.__name__ in registered or module in self._added
            if not known and sys.modules.get(name) is module:
                cloudpickle.register_pickle_by_value(module)
                self._added.append(module)

    def __exit__(self, *exc: object) -> None:
        for module in self._added:
            cloudpickle.unregister_pickle_by_value(module)
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
