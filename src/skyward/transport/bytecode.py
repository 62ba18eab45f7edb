"""What a code object does, as bytes: the same after changes of comments, formatting or names of locals.

Instructions count with their operands resolved. Line numbers, file, module, docstring and qualified names do not count.
"""

from __future__ import annotations

import dis
import itertools
import marshal
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any, cast

__all__ = ["digest", "imports", "reads"]

_SKIPPED = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "PRECALL", "RESUME"})
_DESCRIPTIVE = frozenset({"__doc__", "__qualname__", "__module__", "__firstlineno__", "__static_attributes__"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELLS = ("LOAD_CLOSURE", "LOAD_FAST")
_LOCALS, _JUMPS = frozenset((*dis.haslocal, *dis.hasfree)), frozenset((*dis.hasjrel, *dis.hasjabs))
_KINDS = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200  # *args, **kwargs, generators and coroutines of all kinds


def digest(code: CodeType) -> tuple[bytes, Mapping[str, int]]:
    """Its content, and its variables in the order of use, which does not depend on their names."""
    fresh = itertools.count().__next__
    numbers = defaultdict[str, int](fresh)
    return _digest(code, numbers, fresh), numbers


def reads(code: CodeType) -> Iterator[tuple[str, ...]]:
    """The globals that it reads, each with the attributes taken of it at once: ("os", "path", "join")."""
    for steps in _all(code):
        attributes: tuple[str, ...] = ()
        for step in reversed(steps):
            if step.opname in _GLOBALS:
                yield step.argval, *attributes
            attributes = (step.argval, *attributes) if step.opname in _ATTRIBUTES else ()


def imports(code: CodeType) -> Iterator[str]:
    """What it may import: `from ..a import b` may be of the module "..a" or "..a.b"."""
    for steps in _all(code):
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                module = "." * level.argval + step.argval
                packages = itertools.accumulate(step.argval.split("."), "{}.{}".format)  # they are run, too
                yield from ("." * level.argval + package for package in packages)
                yield from (f"{module}.{name}" if step.argval else module + name for name in names.argval or ())


def _all(code: CodeType) -> Iterator[list[dis.Instruction]]:
    """Also of the functions within it."""
    yield _instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all(constant)


def _instructions(code: CodeType) -> list[dis.Instruction]:
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    told = {at for at, step in enumerate(steps) if step.opname == "STORE_NAME" and step.argval in _DESCRIPTIVE}
    return [step for at, step in enumerate(steps) if at not in told and at + 1 not in told]


def _digest(code: CodeType, numbers: defaultdict[str, int], fresh: Callable[[], int]) -> bytes:
    """`numbers` are those of the scope's variables, which inner functions share."""
    flags = code.co_flags & _KINDS
    count = code.co_argcount + code.co_kwonlyargcount + bool(flags & 0x04) + bool(flags & 0x08)
    parameters = code.co_varnames[:count]
    numbers |= {name: fresh() for name in parameters}
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags, parameters)
    found = blake2b(marshal.dumps(shape, 2), digest_size=16)
    steps = _instructions(code)
    # the number of an instruction by its offset, or that of the next one that counts
    number = partial(bisect_left, [step.offset for step in steps])
    cells = {*code.co_cellvars, *code.co_freevars}
    for step in steps:
        operand: Any = step.arg
        if step.opcode in _LOCALS:
            names = cast("tuple[str, ...]", step.argval if isinstance(step.argval, tuple) else (step.argval,))
            if step.opname.startswith(_CELLS):
                # cells are for a function made there, in the order of their names; its own code says which it uses
                names = tuple(name for name in names if name not in cells)
            operand = [numbers[name] for name in names]
        elif isinstance(step.argval, CodeType):
            free = step.argval.co_freevars
            inner = defaultdict(fresh, {name: numbers[name] for name in free if name in numbers})
            operand = _digest(step.argval, inner, fresh)
            numbers |= {name: inner[name] for name in free if name in inner}
        elif step.opcode in dis.hasconst:
            operand = _constant(code.co_consts[cast(int, step.arg)])  # some versions of dis know it of LOAD_CONST alone
        elif step.opcode in dis.hasname:
            operand = step.argval
        elif step.opcode in _JUMPS:
            operand = number(step.argval)
        found.update(f"{step.opname} {operand!r}\n".encode())
    for entry in cast(Any, dis.Bytecode(code)).exception_entries:
        places = [number(offset) for offset in (entry.start, entry.end, entry.target)]
        found.update(f"{places} {entry.depth} {entry.lasti}\n".encode())
    return found.digest()


def _constant(value: Any) -> bytes:
    """Tuples may hold slices and the like, which marshal does not take everywhere."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return f"{type(value).__name__} {value!r}".encode()
