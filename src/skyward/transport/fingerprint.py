"""What a call is, by content: its arguments, and the code that runs. Both are equal in other processes, too.

    item      the arguments. Plain values by marshal, large buffers by their bytes, other objects as they are pickled
    version   the code: a manifest of all that the function reaches, path by path (`train > helper`, `train > LR`)

Neither source text, which may be newer than the code that runs, nor pickled bytes, which differ between processes. What
the environment has counts by name. Files that a body reads are not seen. What has no content is refused with its path.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import EnumMeta
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from skyward.api.compute import Compute, PendingCompute
from skyward.api.once import Once
from skyward.api.ref import Ref
from skyward.errors import InvalidArgument
from skyward.transport import blobs, bytecode, tensors
from skyward.transport.payload import Packer, is_by_value, unpack

__all__ = ["Fingerprints", "Unstable", "Version"]

_ATOMS = frozenset({int, float, str, bytes, bool, type(None), complex})
_HASHED_FAST = 64 << 10
_HEAP = 1 << 9  # of a class: it was made by a class statement, or like one
_CHECKED = 3  # items whose content is compared with that of a pickled copy
_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_FUNCTIONS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
_NOT_OF_A_CLASS = frozenset(
    """
    __module__ __doc__ __dict__ __weakref__ __firstlineno__ __static_attributes__ __slotnames__ __annotations__
    __annotate__ __annotate_func__ __annotations_cache__ __qualname__ __orig_bases__ __parameters__ __abstractmethods__
    """.split()
)
_OURS = frozenset({"skyward", "builtins", "cloudpickle"})
_OF_A_MODULE = frozenset({"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__"})

Parts = list[tuple[str, Any]]


class Unstable(InvalidArgument):
    """Something that has no content by which another process would know it; the text says where it is."""


@dataclass(frozen=True)
class Version:
    """The code of a call: `id` tells versions apart, the manifest says in words where they differ."""

    id: str
    manifest: Mapping[str, str]


@dataclass
class _Known:
    digest: bytes
    found: tuple[tuple[str, Any], ...]
    value: object  # so that its address stays its own


@dataclass
class _Refused(Exception):
    reason: str
    path: str = ""


class Fingerprints:
    """The fingerprints of calls at this moment: what they refer to must not change while this is used."""

    def __init__(self, extra: Mapping[str, object] | None = None) -> None:
        self._packer = Packer()
        self._extra = dict(extra or {})
        self._known: dict[int, _Known] = {}
        self._large: dict[int, _Known] = {}
        self._open: dict[int, int] = {}  # objects within which we are, and how deep
        self._found: list[tuple[str, Any]] = []  # the user's functions and classes in a value, with their paths
        self._versions: dict[tuple[int, ...], Version] = {}
        self._kept: list[object] = []
        self._checks = _CHECKED
        self._users: dict[str, bool] = {}

    def item(self, call: PendingCompute[Any], name: str) -> tuple[str, Version]:
        """The content of a call's arguments, and the version of its code; `name` is the function's in messages."""
        fn, args = call.fn, call.args
        if isinstance(fn, MethodType):
            fn, args = fn.__func__, (fn.__self__, *args)
        given = (args, ()) if not call.kwargs else _bound(fn, args, call.kwargs)
        self._found = []
        try:
            content = self._value(given)
        except _Refused as exc:
            raise self._unstable(f"the arguments of {name}", exc) from None
        found = [each for _, each in self._found]
        if self._checks and not _is_plain(given):
            self._checks -= 1
            self._check(given, content, name)
        self._known.clear()
        named = name.encode() + b"\0" + content
        return blake2b(named, digest_size=16).hexdigest(), self._version(fn, name, found)

    def _version(self, fn: Any, name: str, values: Iterable[object]) -> Version:
        found = list(enumerate({id(each): each for each in values}.values()))
        key = (id(fn), *(id(each) for _, each in found))
        known = self._versions.get(key)
        if known is None:
            self._kept += [fn, *(each for _, each in found)]
            given = [(f"{_title(each)} (class or function {at} of the arguments)", each) for at, each in found]
            known = self._versions[key] = self._manifest([(name, fn), *given])
        return known

    def _manifest(self, roots: Iterable[tuple[str, Any]]) -> Version:
        """Everything that can be reached from the roots; the code of each function and class once."""
        entries: dict[str, bytes] = {}
        seen: dict[object, str] = {}
        waiting = deque[tuple[str, Any]](roots)
        try:
            for name, value in self._extra.items():
                entries[name] = self._value_at(name, value, waiting)
            while waiting:
                path, value = waiting.popleft()
                key = value.key if isinstance(value, _Module) else id(value)
                if key in seen:
                    entries[path] = b"the same as " + seen[key].encode()
                    continue
                seen[key] = path
                self._kept.append(value)
                if not self._is_definition(value):
                    entries[path] = self._value_at(path, value, waiting)
                    continue
                tag, parts = self._definition(value)
                entries[path] = blake2b(tag, digest_size=16).digest()
                for label, part in parts:
                    below = f"{path} > {label}"
                    if self._is_definition(part):
                        waiting.append((below, part))
                    else:
                        entries[below] = self._value_at(below, part, waiting)
        except _Refused as exc:
            raise self._unstable("", exc) from None
        whole = blake2b(digest_size=16)
        for path, content in sorted(entries.items()):
            whole.update(path.encode() + b"\0" + content + b"\0")
        shown = {path: blake2b(content, digest_size=6).hexdigest() for path, content in entries.items()}
        return Version(whole.hexdigest(), shown)

    def _value_at(self, path: str, value: object, waiting: deque[tuple[str, Any]]) -> bytes:
        self._found = []
        try:
            content = self._value(value)
        except _Refused as exc:
            exc.path = path + exc.path
            raise
        waiting.extend((path + below, each) for below, each in self._found)
        return content

    def _check(self, given: object, content: bytes, name: str) -> None:
        """Refuses arguments that a copy, as a node gets it, would not be equal to: no other process would know them."""
        try:
            head, buffers = self._packer.pack(given, name)
            copy = unpack(head, buffers, keep_classes=True)
        except Exception:
            return  # the call cannot be sent either, and says so by itself
        self._known.clear()
        if self._value(copy) != content:
            raise self._unstable(
                f"the arguments of {name}",
                _Refused("differs from a pickled copy of itself", self._difference(given, copy)),
            )

    def _difference(self, one: Any, other: Any, depth: int = 20) -> str:
        """The path to the first part in which two values differ."""
        if not depth or _is_plain(one) or type(one) is not type(other):
            return ""
        parts, copies = self._apart(one)[1], self._apart(other)[1]
        for (label, part), (_, copy) in zip(parts, copies, strict=False):
            self._known.clear()
            if self._value(part) != self._value(copy):
                return label + self._difference(part, copy, depth - 1)
        return ""

    def _unstable(self, what: str, refused: _Refused) -> Unstable:
        path = f"{what}{refused.path}" if what else refused.path
        return Unstable(
            f"{path} {refused.reason}, so a later run of the program could not tell whether it is the same. Give plain "
            "data, make it inside the function, or leave `resume=` out."
        )

    # values

    def _value(self, value: Any) -> bytes:
        if _is_plain(value):
            plain = marshal.dumps(value, 2)
            return plain if len(plain) < _HASHED_FAST else blobs.digest(plain).encode()
        known = self._known.get(id(value)) or self._large.get(id(value))
        if known is not None:
            self._found += known.found
            return known.digest
        if id(value) in self._open:
            return b"within itself, level %d" % (len(self._open) - self._open[id(value)])
        if self._is_definition(value):
            self._found.append(("", value))
            return b"definition " + _title(value).encode()
        before, self._found = self._found, []
        self._open[id(value)] = len(self._open)
        try:
            tag, parts, ordered = self._apart(value)
            contents: list[bytes] = []
            for label, part in parts:
                start = len(self._found)
                try:
                    contents.append(self._value(part))
                except _Refused as exc:
                    exc.path = label + exc.path
                    raise
                except RecursionError:
                    raise _Refused("is nested too deeply", label) from None
                self._found[start:] = [(label + path, each) for path, each in self._found[start:]]
        finally:
            del self._open[id(value)]
            found, self._found = tuple(self._found), before
        whole = blake2b(tag + b"\0%d\0" % len(contents), digest_size=16)
        for content in contents if ordered else sorted(contents):
            whole.update(b"%d:" % len(content) + content)
        content = whole.digest()
        self._found += found
        large = tensors.is_plain(value) and getattr(value, "nbytes", 0) >= blobs.LARGE
        (self._large if large else self._known)[id(value)] = _Known(content, found, (value, parts))
        return content

    def _apart(self, value: Any) -> tuple[bytes, Parts, bool]:
        """What an object is, its parts with their paths, and whether their order counts."""
        kind = _kind(value)
        if kind is tuple or kind is list:
            return kind.__name__.encode(), [(f"[{index}]", each) for index, each in enumerate(value)], True
        if kind is dict or kind is types.MappingProxyType:
            return b"dict", _pairs(value.items()), True
        if kind is set or kind is frozenset:
            return kind.__name__.encode(), [("{...}", each) for each in value], False
        if kind is bytearray or kind is pickle.PickleBuffer:
            raw = value if kind is bytearray else value.raw()
            return kind.__name__.encode() + blobs.digest(raw).encode(), [], True
        if kind is bytes or kind is str:
            return b"", [], True  # of a subclass of these, which says itself that it is one
        if isinstance(value, Ref):
            raise _Refused("is a Ref, to an object that goes with its pool")
        if isinstance(value, Iterator):
            raise _Refused("is an iterator, which can be read once")
        if isinstance(value, PendingCompute):
            return (
                b"call",
                [("'s function", value.fn), ("'s arguments", value.args), ("'s keywords", dict(value.kwargs))],
                True,
            )
        if isinstance(value, Compute | Once):
            return kind.__name__.encode(), [(" (its function)", cast(Any, value).fn)], True
        if isinstance(value, FunctionType | type):
            return self._elsewhere(value)
        if kind is MethodType:
            return b"method", [(".__func__", value.__func__), (".__self__", value.__self__)], True
        if kind is ModuleType or isinstance(value, ModuleType):
            return b"module " + value.__name__.encode(), [], True
        if isinstance(value, CodeType):
            return bytecode.digest(value), [], True
        if kind is types.CellType:
            return b"cell", _cell(value), True
        if isinstance(value, _DESCRIPTORS):
            return f"{value.__objclass__.__qualname__}.{value.__name__}".encode(), [], True
        if kind in (staticmethod, classmethod):
            return kind.__name__.encode(), [(" (its function)", value.__func__)], True
        if kind is property:
            return b"property", [(" (get)", value.fget), (" (set)", value.fset), (" (delete)", value.fdel)], True
        if kind is functools.cached_property:
            return b"cached_property", [(" (its function)", value.func)], True
        if kind is functools.singledispatchmethod:
            return (
                b"singledispatchmethod",
                [(" (registered)", value.dispatcher.registry), (" (its function)", value.func)],
                True,
            )
        if not self._is_definition(kind) and hasattr(value, "py_func"):  # of numba
            return f"{kind.__module__}.{kind.__qualname__}".encode(), [(" (wrapped)", value.py_func)], True
        return self._reduced(value)

    def _reduced(self, value: Any) -> tuple[bytes, Parts, bool]:
        kind = _kind(value)
        tensors.note_loaded_frameworks()
        reduce = tensors.TABLE.get(kind) or copyreg.dispatch_table.get(kind)
        try:
            made: Any = reduce(value) if reduce is not None else value.__reduce_ex__(5)
        except _Refused:
            raise
        except Exception as exc:  # the user's, or that it cannot be pickled
            if self._is_around(value):
                return f"{kind.__module__}.{kind.__qualname__}".encode(), [(" (wrapped)", value.__wrapped__)], True
            said = f"{type(exc).__name__}: {exc}"
            raise _Refused(f"is a {kind.__module__}.{kind.__qualname__}, which has no content ({said})") from None
        if isinstance(made, str):
            if self._is_around(value):
                return f"{kind.__module__}.{kind.__qualname__}".encode(), [(" (wrapped)", value.__wrapped__)], True
            return f"{kind.__module__}.{kind.__qualname__} {made}".encode(), [(" (its class)", kind)], True
        maker, args, *rest = made
        state, items, pairs, setter = (*rest, None, None, None, None)[:4]
        parts: Parts = [(" (how it is made)", maker), *((f" ({at})", each) for at, each in enumerate(args))]
        parts += _state(state)
        parts += [(f"[{at}]", each) for at, each in enumerate(items or ())]
        parts += _pairs(pairs or ())
        if setter is not None:
            parts.append((" (how it is filled)", setter))
        return b"object", parts, True

    def _is_around(self, value: Any) -> bool:
        """Whether it is what functools.lru_cache, jax.jit and the like make of a function."""
        return callable(value) and not self._is_definition(type(value)) and hasattr(value, "__wrapped__")

    def _elsewhere(self, value: Any) -> tuple[bytes, Parts, bool]:
        """A function or class of the environment: by name, and by what of the user's it holds if it has none."""
        name = f"{value.__module__}.{value.__qualname__}".encode()
        if isinstance(value, type) or (_named(value) is value and not self._is_users(value.__module__)):
            return name, [], True
        code = value.__code__
        tag = f"{value.__globals__.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}".encode()
        registry = getattr(value, "registry", None)
        if isinstance(registry, types.MappingProxyType):  # of functools.singledispatch
            return tag, [(f"[{kind.__name__}]", each) for kind, each in cast(Any, registry).items()], True
        return tag, [*_closure(value), *_defaults(value), *_wrapped(value)], True

    # definitions: functions, classes and modules of the user's

    def _is_definition(self, value: Any) -> bool:
        if isinstance(value, FunctionType):
            return self._is_users(value.__globals__.get("__name__"))
        if isinstance(value, type):
            return bool(value.__flags__ & _HEAP) and self._is_users(value.__module__)
        return isinstance(value, _Module) or (isinstance(value, ModuleType) and self._is_users(value.__name__))

    def _is_users(self, module: object) -> bool:
        """Whether code of this module travels with calls, or lies in a file of the user's; others are by name."""
        if not isinstance(module, str):
            return True
        known = self._users.get(module)
        if known is None:
            known = self._users[module] = self._lies_here(module)
        return known

    def _lies_here(self, module: str) -> bool:
        if module in ("__main__", "__mp_main__"):
            return True
        if module.partition(".")[0] in _OURS:
            return False
        found = sys.modules.get(module)
        return found is None or is_by_value(module) or self._packer.is_foreign(found)

    def _definition(self, value: Any) -> tuple[bytes, Parts]:
        if isinstance(value, _Module):
            return value.digest, list(self._imported(value.code, value.package))
        if isinstance(value, ModuleType):
            return b"module", sorted((n, v) for n, v in vars(value).items() if n not in _OF_A_MODULE)
        return self._class(value) if isinstance(value, type) else self._function(value)

    def _function(self, fn: FunctionType) -> tuple[bytes, Parts]:
        scope, code = fn.__globals__, fn.__code__
        parts = [*_wrapped(fn), *_defaults(fn), *_closure(fn)]
        parts += [(f".{name}", each) for name, each in vars(fn).items() if name != "__wrapped__"]
        for read in sorted(set(bytecode.reads(code)), key=lambda read: (read.name, read.attributes)):
            if read.name in scope and read.name not in _OF_A_MODULE:
                parts.append(self._followed(read.name, scope[read.name], read.attributes))
        parts += self._imported(code, scope.get("__package__"))
        return bytecode.digest(code), list(dict(parts).items())

    def _followed(self, name: str, value: Any, attributes: Sequence[str]) -> tuple[str, Any]:
        """What code reads of a module of the user's: only that, not all the module has."""
        for attribute in attributes:
            if not isinstance(value, ModuleType) or not self._is_definition(value) or not hasattr(value, attribute):
                break
            name, value = f"{name}.{attribute}", getattr(value, attribute)
        return name, value

    def _imported(self, code: CodeType, package: object) -> Iterator[tuple[str, Any]]:
        """Modules of the user's that code imports when it runs: as their files are now, for so they will be run."""
        for each in bytecode.imports(code):
            try:
                name = importlib.util.resolve_name("." * each.level + each.module, cast(Any, package) or None)
            except ImportError:
                continue  # it will fail there, too
            for found in (name, *(f"{name}.{below}" for below in each.names)):
                if (module := self._module(found)) is not None:
                    yield f"import {found}", module

    def _module(self, name: str) -> _Module | None:
        if name.partition(".")[0] in sys.stdlib_module_names or name.startswith("skyward."):
            return None
        try:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None or not self._packer.is_foreign_file(spec.origin):
                return None
            code = cast(Any, spec.loader).get_code(name)
        except Exception:  # there is no such module, or none that Python has the code of
            return None
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        return _Module(f"module {name}", code, package) if isinstance(code, CodeType) else None

    def _class(self, kind: type) -> tuple[bytes, Parts]:
        parts: Parts = [(f"(base {at}, {each.__name__})", each) for at, each in enumerate(kind.__bases__)]
        if type(kind) is not type:
            parts.append(("(metaclass)", type(kind)))
        if isinstance(kind, EnumMeta):
            members = cast("Mapping[str, Any]", kind.__members__)
            parts += [(name, each.value) for name, each in members.items()]
            return b"enum", parts + [(n, v) for n, v in vars(kind).items() if isinstance(v, _FUNCTIONS)]
        parts.append(("(annotations)", _annotations(kind)))
        for name, each in vars(kind).items():
            special = name.startswith("__") and name.endswith("__")
            if name in _NOT_OF_A_CLASS or name.startswith("_abc_") or isinstance(each, _DESCRIPTORS):
                continue
            if not special or isinstance(each, _FUNCTIONS) or _is_plain(each):
                parts.append((name, _undressed(each)))
        return b"class", sorted(parts, key=lambda part: part[0])


@dataclass(frozen=True)
class _Module:
    """A module that code imports when it runs: what its file says."""

    key: str
    code: CodeType = field(repr=False)
    package: str

    @property
    def digest(self) -> bytes:
        return bytecode.digest(self.code)


def _is_plain(value: Any, depth: int = 12) -> bool:
    """Whether marshal alone does: builtin types and builtin containers of them, nothing derived."""
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
    """Arguments as the function gets them, however they were given; keywords that it has no parameter for by name."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, tuple(sorted(kwargs.items()))
    plain: list[Any] = []
    other: list[tuple[str, Any]] = []
    for number, (name, parameter) in enumerate(bound.signature.parameters.items()):
        if name not in bound.arguments:
            continue
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            plain += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            other += value.items()
        elif parameter.kind is parameter.KEYWORD_ONLY or len(plain) < number:
            other.append((name, value))
        else:
            plain.append(value)
    return tuple(plain), tuple(sorted(other, key=lambda pair: pair[0]))


def _pairs(items: Iterable[tuple[Any, Any]]) -> Parts:
    parts: Parts = []
    for key, value in items:
        shown = repr(key) if type(key) in _ATOMS else type(key).__name__
        parts += [(f"[{shown}] (the key)", key), (f"[{shown}]", value)]
    return parts


def _state(state: Any) -> Parts:
    """What an object's attributes hold, by name; those in slots come second in a pair."""
    parts: Parts = []
    for each in state if _kind(state) is tuple and len(state) == 2 else (state,):
        attributes = each if _kind(each) is dict else {0: each}
        if all(type(name) is str for name in attributes):
            parts += [(f".{name}", attributes[name]) for name in sorted(attributes)]
        elif each is not None:
            parts.append((" (its state)", each))
    return parts


def _kind(value: Any) -> Any:
    return cast(Any, type(value))


def _defaults(fn: FunctionType) -> Parts:
    given, code = fn.__defaults__ or (), fn.__code__
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    return [
        *((f"default of {name}", value) for name, value in zip(names, given, strict=False)),
        *((f"default of {name}", value) for name, value in (fn.__kwdefaults__ or {}).items()),
    ]


def _closure(fn: FunctionType) -> Parts:
    """Variables of the enclosing function, by the order in which they are used: their names do not count."""
    numbers = bytecode.numbered(fn.__code__)
    parts: Parts = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        if name == "__class__":
            parts += [("its class", each) for _, each in _cell(cell)]
        elif name in numbers:
            parts += [(f"closure {numbers[name]}", each) for _, each in _cell(cell)]
    return sorted(parts, key=lambda part: part[0])


def _cell(cell: Any) -> Parts:
    try:
        return [("", cell.cell_contents)]
    except ValueError:
        return []  # it is not filled yet


def _wrapped(fn: FunctionType) -> Parts:
    inner = getattr(fn, "__wrapped__", None)
    return [] if inner is None else [("(wrapped)", inner)]


def _undressed(member: Any) -> Any:
    """The function in a static or class method, so that it has an entry of its own."""
    return member.__func__ if _kind(member) in (staticmethod, classmethod) else member


def _annotations(kind: Any) -> list[tuple[str, str]]:
    try:
        found: dict[str, Any] = dict(inspect.get_annotations(kind))
    except Exception:  # of names that only type checkers know
        return []
    return [(n, v if isinstance(v, str) else getattr(v, "__qualname__", type(v).__name__)) for n, v in found.items()]


def _title(value: Any) -> str:
    return str(value.__name__ if _kind(value) is ModuleType else value.__qualname__)


def _named(value: Any) -> Any:
    """What its own name leads to, in the module that it says it is of."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = cast(Any, getattr(found, name, None))
    return found
