"""What a call is, by content: its arguments, and the code that runs. Both are equal in other processes, too.

    item      the arguments. Plain values by marshal, large buffers by their bytes, other objects as they are pickled
    version   the code: a manifest of all that the function reaches, path by path (`train > helper`, `train > LR`)

Source text may be newer than the code that runs, and pickled bytes differ between processes. What the environment has
counts by name. Files that a body reads are not seen. What has no content is refused with its path.
"""

from __future__ import annotations

import copyreg
import functools
import importlib.util
import inspect
import marshal
import pickle
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import EnumMeta
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

from skyward.api.compute import Compute, PendingCompute
from skyward.api.once import Once
from skyward.api.ref import Ref
from skyward.errors import InvalidArgument
from skyward.transport import blobs, bytecode, tensors
from skyward.transport.payload import Packer, is_by_value, unpack

__all__ = ["Fingerprints", "Unstable", "Version", "changes"]

_ATOMS = frozenset({int, float, str, bytes, bool, type(None), complex})
_HASHED_FAST = 64 << 10
_NAMED = 6
_SHOWN = 12  # steps of a path in a message
_HEAP = 1 << 9  # of a class: it was made by a class statement, or like one
_ARGUMENTS = "the arguments of "
_CHECKED = 3  # items whose content is compared with that of a pickled copy
_MAIN = frozenset({"__main__", "__mp_main__"})
_HELD = {  # what cannot be pickled counts by these attributes
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.singledispatchmethod: ("func", "dispatcher"),
    MethodType: ("__func__", "__self__"),
    PendingCompute: ("fn", "args", "kwargs"),
    Compute: ("fn",),
    Once: ("fn",),
}
_FUNCTIONS = (FunctionType, staticmethod, classmethod, property, functools.cached_property, functools.partial)
_FIELDS = "__pydantic_fields__"  # the only place that has defaults and limits of a model's fields
_MADE_FOR_CLASSES = (types.MemberDescriptorType, types.GetSetDescriptorType)
_NOT_OF_A_CLASS = frozenset(
    """
    __module__ __doc__ __firstlineno__ __static_attributes__ __slotnames__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __qualname__
    """.split()
)
_OF_A_MODULE = frozenset({"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__"})

Parts = list[tuple[str, Any]]
"""With the way to each: " > helper", "[3]", ".rate"."""


class Unstable(InvalidArgument):
    """Something without content by which another process would know it; the text says where."""


class Version(NamedTuple):
    """`id` tells versions apart, the manifest says in words where they differ."""

    id: str
    manifest: Mapping[str, str]


def changes(before: Mapping[str, str] | None, after: Mapping[str, str]) -> str:
    if before is None:
        return "not known, since the record of that version is damaged"
    paths = [path for path in {**after, **before} if before.get(path) != after.get(path)]
    more = len(paths) - _NAMED
    return "; ".join(paths[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


class _Known(NamedTuple):
    digest: bytes
    definitions: list[tuple[tuple[str, ...], Any]]
    value: object  # so that its address stays its own


class Fingerprints:
    """While it is used, what the calls refer to must not change."""

    def __init__(self, extra: Mapping[str, object] | None = None) -> None:
        self._packer = Packer()
        self._extra = dict(extra or {})
        self._known: dict[int, _Known] = {}
        self._large: dict[int, _Known] = {}  # for all items, which may share them
        self._open: dict[int, int] = {}  # objects within which we are, and how deep
        self._path: list[str] = []  # to where we are
        self._definitions: list[tuple[tuple[str, ...], Any]] = []  # functions and classes in a value, with their paths
        self._versions: dict[tuple[int, ...], Version] = {}
        self._modules: dict[str, FunctionType | None] = {}
        self._kept: list[object] = []
        self._checks = _CHECKED

    def item(self, call: PendingCompute[Any], name: str) -> tuple[str, Version]:
        """The content of the arguments, and the version of the code; `name` is for messages."""
        fn, args = call.fn, call.args
        if isinstance(fn, MethodType):
            fn, args = fn.__func__, (fn.__self__, *args)
        given = (args, ()) if not call.kwargs else _bound(fn, args, call.kwargs)
        what = _ARGUMENTS + name
        content = self._content(what, given)
        definitions = {id(each): each for _, each in self._definitions}
        if self._checks and not _is_plain(given):
            self._checks -= 1
            self._compare_with_copy(what, given, content)
        key = (id(fn), *definitions)
        if key not in self._versions:
            self._kept += [fn, *definitions.values()]
            given = [
                (f"{_title(each)} (class or function {at} of the arguments)", each)
                for at, each in enumerate(definitions.values())
            ]
            self._versions[key] = self._manifest([(name, fn), *given])
        return _hashed(name.encode(), content).hex(), self._versions[key]

    def _manifest(self, roots: Parts) -> Version:
        """All that can be reached from the roots; the code of each function and class once."""
        entries = defaultdict[str, list[bytes]](list)
        seen: dict[int, str] = {}
        waiting = deque([*self._extra.items(), *roots])
        while waiting:
            path, value = waiting.popleft()
            if not self._is_definition(value):
                entries[path].append(self._content(path, value))
                waiting += [("".join(below), each) for below, each in self._definitions]
            elif id(value) in seen:
                entries[path].append(b"the same as " + seen[id(value)].encode())
            else:
                seen[id(value)] = path
                self._kept.append(value)
                tag, parts = self._defined(value)
                entries[path].append(tag)
                waiting += [(f"{path} > {label}", part) for label, part in parts]
        found = {path: _hashed(*sorted(contents)) for path, contents in sorted(entries.items())}
        whole = _hashed(*(each for path, content in found.items() for each in (path.encode(), content)))
        return Version(whole.hex(), {path: content.hex()[:12] for path, content in found.items()})

    def _compare_with_copy(self, what: str, given: object, content: bytes) -> None:
        """Refuses arguments that are not equal to a copy such as a node gets: no other process would know them."""
        try:
            copy = unpack(*self._packer.pack(given, what), keep_classes=True)
        except Exception:
            return  # the call cannot be sent either, and says so by itself
        if self._content(what, copy) != content:
            self._path = [what, *self._difference(given, copy)]
            raise self._unstable("differs from a pickled copy of itself")

    def _difference(self, one: Any, other: Any, depth: int = _SHOWN) -> list[str]:
        """The path to the first part that differs."""
        if not depth or _is_plain(one) or type(one) is not type(other):
            return []
        for (label, part), (_, copy) in zip(self._apart(one)[1], self._apart(other)[1], strict=False):
            if self._content(label, part) != self._content(label, copy):
                return [label, *self._difference(part, copy, depth - 1)]
        return []

    def _unstable(self, reason: str) -> Unstable:
        what, *way = self._path[:_SHOWN]
        if what.startswith(_ARGUMENTS) and way[:1] == ["[0]"] and len(way) > 1:
            what, way = f"argument {way[1].strip('[]')} of {what.removeprefix(_ARGUMENTS)}", way[2:]
            what += ", at " * bool(way)
        more = "..." if len(self._path) > _SHOWN else ""
        return Unstable(
            f"{what}{''.join(way)}{more} {reason}, so a later run of the program could not tell whether it "
            "is the same. Give plain data, make it inside the function, or leave `resume=` out."
        )

    # values

    def _content(self, path: str, value: Any) -> bytes:
        self._path, self._definitions, self._open, self._known = [path], [], {}, {}
        try:
            return self._value(value)
        except RecursionError:
            raise self._unstable("is nested too deeply") from None

    def _value(self, value: Any) -> bytes:
        if _is_plain(value):
            plain = marshal.dumps(value, 2)
            return plain if len(plain) < _HASHED_FAST else blobs.digest(plain).encode()
        if known := self._known.get(id(value)) or self._large.get(id(value)):
            self._definitions += [((*self._path, *below), each) for below, each in known.definitions]
            return known.digest
        if id(value) in self._open:
            return b"within itself, level %d" % (len(self._open) - self._open[id(value)])
        if self._is_definition(value):
            self._definitions.append((tuple(self._path), value))
            return b"definition " + _title(value).encode()
        start, depth = len(self._definitions), len(self._path)
        self._open[id(value)] = len(self._open)
        tag, parts = self._apart(value)
        contents: list[bytes] = []
        for label, part in parts:
            self._path.append(label)
            contents.append(self._value(part))
            self._path.pop()
        del self._open[id(value)]
        content = _hashed(tag, *(sorted(contents) if type(value) in (set, frozenset) else contents))
        below = [(path[depth:], each) for path, each in self._definitions[start:]]
        large = _kind(value) is Ref or (tensors.is_plain(value) and getattr(value, "nbytes", 0) >= blobs.LARGE)
        (self._large if large else self._known)[id(value)] = _Known(content, below, (value, parts))
        return content

    def _apart(self, value: Any) -> tuple[bytes, Parts]:
        kind = _kind(value)
        tag = f"{kind.__module__}.{kind.__qualname__}".encode()
        if kind is tuple or kind is list:
            return tag, [(f"[{index}]", each) for index, each in enumerate(value)]
        if kind is dict or kind is types.MappingProxyType:
            return b"dict", _pairs(value.items())
        if kind is set or kind is frozenset:
            return tag, [("{...}", each) for each in value]
        if kind is bytearray or kind is pickle.PickleBuffer:
            return tag + blobs.digest(value if kind is bytearray else value.raw()).encode(), []
        if isinstance(value, Ref):
            ref = cast("Ref[Any]", value)
            if ref.kept is not None or ref.inner:
                raise self._unstable(
                    "is a Ref to a result that stays on its node, or to an object with other Refs in it"
                )
            return b"put", [("", ref.get())]
        if isinstance(value, Iterator):
            raise self._unstable("is an iterator, which can be read once")
        if issubclass(kind, FunctionType | type):  # isinstance believes what proxies say
            return self._of_environment(value)
        if isinstance(value, ModuleType):
            return b"module " + value.__name__.encode(), []
        if isinstance(value, CodeType):
            return bytecode.digest(value)[0], []
        held = _HELD.get(kind, ())
        if self._is_wrapper(value, "py_func") and isinstance(value.py_func, FunctionType):  # of numba
            held = ("py_func",)
        elif hasattr(kind, "_self_wrapper"):  # of wrapt
            held = ("__wrapped__", "_self_wrapper")
        if held:
            return tag, [(f".{name}", getattr(value, name)) for name in held]
        if kind.__module__.startswith("jaxlib") and self._is_wrapper(value, "__wrapped__"):
            return tag, [(".__wrapped__", value.__wrapped__)]  # of jax.jit, which is pickled with what cannot be
        tensors.note_loaded_frameworks()
        reduce = tensors.TABLE.get(kind) or copyreg.dispatch_table.get(kind)
        try:
            made: Any = reduce(value) if reduce is not None else value.__reduce_ex__(5)
        except Exception as exc:  # the user's, or that it cannot be pickled
            made = exc
        if isinstance(made, str | Exception) and self._is_wrapper(value, "__wrapped__"):
            return tag, [(".__wrapped__", value.__wrapped__)]  # of functools.lru_cache and the like
        if isinstance(made, Exception):
            raise self._unstable(
                f"is a {kind.__module__}.{kind.__qualname__}, which has no content ({type(made).__name__}: {made})"
            )
        if isinstance(made, str):
            return tag + f" {getattr(value, '__module__', '')}.{made}".encode(), [(" (its class)", kind)]
        maker, args, *rest = made
        state, items, pairs, setter = (*rest, None, None, None, None)[:4]
        parts: Parts = [(" (how it is made)", maker), *((f" ({at})", each) for at, each in enumerate(args))]
        parts += [*_state(state), *((f"[{at}]", each) for at, each in enumerate(items or ())), *_pairs(pairs or ())]
        return b"object", [*parts, (" (how it is filled)", setter)]

    def _is_wrapper(self, value: Any, attribute: str) -> bool:
        """Whether a package made it of a function of the user's, which it has as this attribute."""
        return callable(value) and not self._is_definition(type(value)) and hasattr(value, attribute)

    def _of_environment(self, value: Any) -> tuple[bytes, Parts]:
        """By name, and by what of the user's it holds if it has none."""
        name = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, type) or (_named(value) is value and not self._is_users(value.__module__)):
            return name.encode(), []
        tag = f"{value.__globals__.get('__name__')}.{value.__code__.co_qualname}".encode()
        registry = getattr(value, "registry", None)
        if isinstance(registry, types.MappingProxyType):  # of functools.singledispatch
            return tag, [(f"[{kind.__name__}]", each) for kind, each in cast(Any, registry).items()]
        return tag, _held_by(value)

    # definitions: functions, classes and modules of the user's

    def _is_definition(self, value: Any) -> bool:
        if _kind(value) is FunctionType:
            return self._is_users(value.__globals__.get("__name__"))
        if issubclass(_kind(value), type):
            return bool(value.__flags__ & _HEAP) and self._is_users(value.__module__)
        return isinstance(value, ModuleType) and self._is_users(value.__name__)

    def _is_users(self, module: object) -> bool:
        """Whether code of this module travels with calls, or lies in a file of the user's."""
        found = sys.modules.get(module) if isinstance(module, str) else None
        return found is None or module in _MAIN or is_by_value(found.__name__) or self._packer.is_foreign(found)

    def _defined(self, value: Any) -> tuple[bytes, Parts]:
        if isinstance(value, ModuleType):
            return b"module", sorted((n, v) for n, v in vars(value).items() if n not in _OF_A_MODULE)
        if isinstance(value, type):
            return b"class", sorted(_members(value), key=lambda part: part[0])
        scope, code = value.__globals__, value.__code__
        parts = dict(_held_by(value))
        for name, *attributes in sorted(set(bytecode.reads(code))):
            if name in scope and name not in _OF_A_MODULE:
                read = scope[name]
                for attribute in attributes:  # of a module of the user's: only what is read, not all that it has
                    if (
                        not isinstance(read, ModuleType)
                        or not self._is_definition(read)
                        or not hasattr(read, attribute)
                    ):
                        break
                    name, read = f"{name}.{attribute}", getattr(read, attribute)
                parts[name] = read
        for name in bytecode.imports(code):
            if (module := self._imported(name, scope.get("__package__"))) is not None:
                parts[f"import {module.__name__}"] = module
        return bytecode.digest(code)[0], list(parts.items())

    def _imported(self, name: str, package: Any) -> FunctionType | None:
        """A module of the user's, as its file is now: so it will be run."""
        try:
            name = importlib.util.resolve_name(name, package or None)
            if name in self._modules or name.partition(".")[0] in {*sys.stdlib_module_names, "skyward"}:
                return self._modules.get(name)
            self._modules[name] = None
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None and self._packer.is_foreign_file(spec.origin):
                scope = {"__name__": name, "__package__": spec.parent}
                self._modules[name] = FunctionType(cast(Any, spec.loader).get_code(name), scope, name)
        except Exception:  # there is no such module, or none that Python has the code of
            pass
        return self._modules.get(name)


def _hashed(*contents: bytes) -> bytes:
    whole = blake2b(digest_size=16)
    for content in contents:
        whole.update(b"%d:" % len(content) + content)
    return whole.digest()


def _is_plain(value: Any, depth: int = 12) -> bool:
    """Whether marshal alone does: builtin types and containers of them, nothing derived."""
    kind = _kind(value)
    if kind in _ATOMS:
        return True
    if kind is dict:
        return _are_plain(value, depth) and _are_plain(value.values(), depth)
    return (kind is list or kind is tuple or kind is set or kind is frozenset) and _are_plain(value, depth)


def _are_plain(values: Iterable[Any], depth: int) -> bool:
    return _ATOMS.issuperset(map(type, values)) or (
        depth > 0 and all(type(each) in _ATOMS or _is_plain(each, depth - 1) for each in values)
    )


def _bound(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """As the function gets them, however they were given."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, tuple(sorted(kwargs.items()))
    return bound.args, tuple(sorted(bound.kwargs.items()))


def _pairs(items: Iterable[tuple[Any, Any]]) -> Parts:
    parts: Parts = []
    for key, value in items:
        shown = repr(key) if type(key) in _ATOMS else type(key).__name__
        parts += [(f"[{shown}] (the key)", key), (f"[{shown}]", value)]
    return parts


def _state(state: Any) -> Parts:
    """Attributes by name; those in slots come second in a pair."""
    parts: Parts = []
    for each in state if _kind(state) is tuple and len(state) == 2 else (state,):
        if _kind(each) is dict and all(type(name) is str for name in each):
            parts += [(f".{name}", each[name]) for name in sorted(each)]
        elif each is not None:
            parts.append((" (its state)", each))
    return parts


def _held_by(fn: FunctionType) -> Parts:
    """Defaults, closure and attributes.

    Variables of the enclosing function go by their order of use: names do not count.
    """
    code, numbers = fn.__code__, bytecode.digest(fn.__code__)[1]
    names = code.co_varnames[code.co_argcount - len(fn.__defaults__ or ()) :]
    defaults = {**dict(zip(names, fn.__defaults__ or (), strict=False)), **(fn.__kwdefaults__ or {})}
    parts: Parts = [(f"default of {name}", value) for name, value in defaults.items()]
    closed = dict(zip(code.co_freevars, fn.__closure__ or (), strict=False))
    for name in sorted(closed.keys() & numbers.keys(), key=numbers.__getitem__):
        try:
            label = "its class" if name == "__class__" else f"closure {numbers[name]}"
            parts.append((label, closed[name].cell_contents))
        except ValueError:  # it is not filled yet
            continue
    # torch.compile notes the wrapper's own address, which differs between processes
    attributes = {name: each for name, each in vars(fn).items() if type(each) is not int or each != id(fn)}
    return [*parts, *((f".{name}", each) for name, each in attributes.items())]


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    yield from ((f"(base {at}, {each.__name__})", each) for at, each in enumerate(kind.__bases__))
    if type(kind) is not type:
        yield "(metaclass)", type(kind)
    if isinstance(kind, EnumMeta):
        yield from ((name, each.value) for name, each in cast("Mapping[str, Any]", kind.__members__).items())
        yield from ((name, each) for name, each in vars(kind).items() if isinstance(each, _FUNCTIONS))
        return
    try:
        annotations = inspect.get_annotations(kind)
    except Exception:  # of names that only type checkers know
        annotations = {}
    yield "(annotations)", [(n, v if isinstance(v, str) else _title(v)) for n, v in annotations.items()]
    for name, each in vars(kind).items():
        special = name.startswith("__") and name.endswith("__")
        if name in _NOT_OF_A_CLASS or name.startswith("_abc_") or isinstance(each, _MADE_FOR_CLASSES):
            continue
        if name == "__hash__" and isinstance(each, FunctionType) and each.__code__.co_filename.startswith("<attrs "):
            yield (
                name,
                each.__code__.co_names,
            )  # attrs puts the hash of a string into it, which differs between processes
        elif not special or name == _FIELDS or isinstance(each, _FUNCTIONS) or _is_plain(each):
            yield name, each


def _kind(value: Any) -> Any:
    return cast(Any, type(value))


def _title(value: Any) -> str:
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__qualname__", type(value).__name__)


def _named(value: Any) -> Any:
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = cast(Any, getattr(found, name, None))
    return found
