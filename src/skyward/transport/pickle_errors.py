"""Why something cannot be pickled: the path to the part at fault, and what to do about it."""

from __future__ import annotations

import functools
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

__all__ = ["StaysHere", "explain", "names"]

_SECONDS = 0.08

Pickle = Callable[[object], object]


class StaysHere(TypeError):
    """Raised by objects of ours that are not sent."""


def explain(value: object, what: str, exc: BaseException, pickle: Pickle) -> str:
    path, culprit = _culprit(value, what, pickle)
    path = re.sub(r"arguments of (.+?)\[(?:0|1)\]\[(.+?)\]((?:\.\w+)*)", _argument, path)
    own = _own_words(culprit, pickle)
    if own is not None:
        return f"{path} cannot be sent: {own}"
    return (
        f"{path} cannot be pickled: it is a {type(culprit).__module__}.{type(culprit).__qualname__} "
        f"({type(exc).__name__}: {exc}). {_advice(culprit)}"
    )


def _argument(found: re.Match[str]) -> str:
    inner = f", attribute {found[3][1:]}" if found[3] else ""
    return f"argument {found[2]} of {found[1]}{inner}"


def _culprit(value: object, label: str, pickle: Pickle) -> tuple[str, object]:
    deadline = time.monotonic() + _SECONDS
    seen: set[int] = set()
    path, current = label, value
    while True:
        seen.add(id(current))
        for name, part in _parts(current, pickle):
            if time.monotonic() > deadline:
                return path, current
            if id(part) not in seen and not _picklable(part, pickle):
                path, current = _join(path, name), part
                break
        else:
            return path, current


def _own_words(value: object, pickle: Pickle) -> str | None:
    try:
        pickle(value)
    except StaysHere as exc:
        return str(exc)
    except Exception:
        return None
    return None


def _join(path: str, name: str) -> str:
    return f"{path}{name}" if name.startswith(("[", ".")) else f"{name} of {path}"


def _parts(value: object, pickle: Pickle) -> Iterator[tuple[str, object]]:
    if type(value).__module__.startswith("skyward.") and _own_words(value, pickle) is not None:
        return  # it says itself why it is not sent
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        yield "the function", partial.func
        yield from ((f"[{i}]", a) for i, a in enumerate(partial.args))
        yield from ((f"[{k!r}]", v) for k, v in partial.keywords.items())
    elif isinstance(value, MethodType):
        yield "the object", value.__self__
        yield "the function", value.__func__
    elif isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield f"[{key!r}]", item
            yield f"[{key!r} (the key)]", key
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(cast("Iterable[Any]", value)):
            yield f"[{index}]", item
    elif isinstance(value, BaseException):
        yield from ((f".args[{i}]", a) for i, a in enumerate(value.args))
        yield from ((f".{k}", v) for k, v in vars(value).items())
    elif not isinstance(value, type | ModuleType):
        yield from ((f".{k}", v) for k, v in getattr(value, "__dict__", {}).items())


def _function_parts(fn: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield f"closure variable '{name}'", cell.cell_contents
        except ValueError:
            continue  # a cell that is not filled yet
    for index, default in enumerate(fn.__defaults__ or ()):
        yield f"default {index}", default
    for name, default in (fn.__kwdefaults__ or {}).items():
        yield f"default '{name}'", default
    for name in names(fn.__code__):
        if name in fn.__globals__:
            yield f"global '{name}'", fn.__globals__[name]
    wrapped = getattr(fn, "__wrapped__", None)
    if wrapped is not None:
        yield "the wrapped function", wrapped


def _picklable(value: object, pickle: Pickle) -> bool:
    try:
        pickle(value)
    except Exception:  # the caller only asks whether
        return False
    return True


def names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if hasattr(const, "co_names"):
            yield from names(const)


def _advice(value: object) -> str:
    kind = type(value)
    advice: list[tuple[Callable[[], bool], str]] = [
        (lambda: kind.__name__ == "generator", "Annotate the parameter Iterator[...] to stream it, or pass a list."),
        (lambda: kind.__name__ in {"lock", "RLock", "Condition", "Event"}, "Create it inside the function."),
        (lambda: isinstance(value, io.IOBase), "Pass the path and open the file inside the function."),
        (lambda: kind.__name__ in {"socket", "Connection"}, "Open the connection inside the function."),
        (lambda: kind.__name__ in {"coroutine", "async_generator"}, "Pass the function itself, not its call."),
    ]
    for applies, text in advice:
        if applies():
            return text
    return "Create it inside the function, or pass what is needed to make it."
