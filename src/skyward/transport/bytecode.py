"""What a code object does, as bytes: equal for code that differs in comments, formatting or names of locals only.

Instructions count with their operands resolved. Line numbers, file, module, docstring and qualified names do not count.
"""

from __future__ import annotations

import dis
import itertools
import marshal
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import CodeType
from typing import Any, cast

__all__ = ["Import", "Read", "digest", "imports", "numbered", "reads"]

_SKIPPED = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "PRECALL", "RESUME"})
_DESCRIPTIVE = frozenset({"__doc__", "__qualname__", "__module__", "__firstlineno__", "__static_attributes__"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"})
_NAMES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_KINDS = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200  # *args, **kwargs, generators and coroutines of all kinds
_CONSTANT, _NAMED, _LOCAL = frozenset(dis.hasconst), frozenset(dis.hasname), frozenset((*dis.haslocal, *dis.hasfree))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


@dataclass(frozen=True)
class Read:
    """A global that code reads, and the attributes that it takes of it at once: `os.path.join`."""

    name: str
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class Import:
    """An import statement inside code: `from ..a import b, c` is level 2, module "a", names "b" and "c"."""

    level: int
    module: str
    names: tuple[str, ...]


def digest(code: CodeType) -> bytes:
    return _digest(code, {}, itertools.count().__next__)


def numbered(code: CodeType) -> Mapping[str, int]:
    """The free variables of code by the order in which it uses them, which does not depend on their names."""
    numbers: dict[str, int] = {}
    _digest(code, numbers, itertools.count().__next__)
    return {name: number for name, number in numbers.items() if name in code.co_freevars}


def reads(code: CodeType) -> Iterator[Read]:
    """The globals that code and the functions within it read."""
    for each in _all(code):
        steps = _instructions(each)
        for at, step in enumerate(steps):
            if step.opname in _NAMES:
                follow = itertools.takewhile(lambda s: s.opname in _ATTRIBUTES, steps[at + 1 :])
                yield Read(step.argval, tuple(s.argval for s in follow))


def imports(code: CodeType) -> Iterator[Import]:
    """The import statements of code and of the functions within it."""
    for each in _all(code):
        steps = _instructions(each)
        for at, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level, names = (steps[at - 2].argval, steps[at - 1].argval) if at > 1 else (0, None)
                yield Import(int(level or 0), step.argval, tuple(names or ()))


def _all(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all(constant)


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]


def _digest(code: CodeType, numbers: dict[str, int], fresh: Callable[[], int]) -> bytes:
    """`numbers` are those of the variables of the scope, which functions within it share."""
    count = code.co_argcount + code.co_kwonlyargcount
    flags = code.co_flags & _KINDS
    count += bool(flags & 0x04) + bool(flags & 0x08)
    parameters = code.co_varnames[:count]
    for name in parameters:
        numbers[name] = fresh()
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags, parameters)
    found = blake2b(marshal.dumps(shape, 2), digest_size=16)
    steps = _instructions(code)
    at = _positions(steps)
    cells = {*code.co_cellvars, *code.co_freevars}
    for number, step in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else step
        if following.opname == "STORE_NAME" and following.argval in _DESCRIPTIVE:
            continue
        found.update(step.opname.encode() + b"\0" + _operand(step, numbers, fresh, cells, at) + b"\0")
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        places = tuple(at(offset) for offset in (entry.start, entry.end, entry.target))
        found.update(marshal.dumps((*places, entry.depth, entry.lasti), 2))
    return found.digest()


def _operand(
    step: Any,
    numbers: dict[str, int],
    fresh: Callable[[], int],
    cells: set[str],
    at: Callable[[int], int],
) -> bytes:
    code, value = step.opcode, step.argval
    if code in _LOCAL:
        names = cast("tuple[str, ...]", value if isinstance(value, tuple) else (value,))
        if step.opname == "LOAD_CLOSURE" or step.opname.startswith("LOAD_FAST"):
            # cells are for a function made there, in the order of their names; its own code says which it uses
            names = tuple(name for name in names if name not in cells)
        return repr([numbers[n] if n in numbers else numbers.setdefault(n, fresh()) for n in names]).encode()
    if isinstance(value, CodeType):
        inner = {name: numbers[name] for name in value.co_freevars if name in numbers}
        made = _digest(value, inner, fresh)
        numbers.update((name, inner[name]) for name in value.co_freevars if name in inner)
        return made
    if code in _CONSTANT:
        return constant(value)
    if code in _NAMED:
        return str(value).encode()
    if code in _JUMPS:
        return str(at(value)).encode()
    return str(step.arg).encode()


def constant(value: Any) -> bytes:
    """A constant of code; tuples of them may hold slices and the like, which marshal does not take everywhere."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return f"{type(value).__name__} {value!r}".encode()


def _positions(steps: list[dis.Instruction]) -> Callable[[int], int]:
    """From the offset of an instruction to its number among those that count, or that of the next one."""
    offsets = [step.offset for step in steps]
    return lambda offset: bisect_left(offsets, offset)
