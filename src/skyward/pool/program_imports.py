"""Which packages a detached program imports, looked up on its node 0 before it is handed over.

    program, modules beside it --syntax trees--> Import ┐
    function of sky.detach --its pickle--> Import       ┴--> missing there: an error or a warning

No code of the user's runs for this.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from skyward.api.shell import Shell
from skyward.errors import BootstrapError, InvalidArgument

__all__ = ["Import", "check", "of_function", "of_program"]

_PATIENCE = 120.0
_LOOK_UP = """
import importlib.util, json, sys
names, path = json.load(sys.stdin)
sys.path += path
print(json.dumps([name for name in names if importlib.util.find_spec(name) is None]))
"""


@dataclass(frozen=True)
class Import:
    package: str
    """Its first part, which is looked up."""
    where: str
    needed: bool = True
    """Whether it is certainly imported; not inside functions, unless they are calls."""


def of_program(program: Path) -> list[Import]:
    """Also through modules beside it; InvalidArgument if one of them is no Python."""
    return list(_followed(program, program.resolve().parent, is_program=True))


def of_function(data: bytes, here: Path) -> list[Import]:
    """When a pickled function is unpickled; also through modules below `here`."""
    reader = _Reader(data)
    with suppress(Exception):  # what is packed in an unusual way is read as far as possible: it is no proof
        reader.load()
    found: list[Import] = []
    for name in sorted(reader.modules):
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "/").resolve()
        if file.suffix == ".py" and file.is_relative_to(here.resolve()):
            found += _followed(file, file.parents[name.count(".") + (file.name == "__init__.py")])
        else:
            found.append(Import(name.partition(".")[0], "the function"))
    return found


def check(shell: Shell, python: str, imports: Sequence[Import], path: Sequence[str]) -> list[str]:
    """Raises if something needed is missing there; else a sentence for each package that may be missing.

    `path`: where it looks for modules beside its environment.
    """
    names = sorted({each.package for each in imports} - sys.stdlib_module_names - {"skyward", "__main__"})
    done = shell.run([python, "-P", "-c", _LOOK_UP], json.dumps([names, list(path)]).encode(), _PATIENCE)
    if done.code:
        raise BootstrapError("looking up what the program imports", f"{shell.name}: {done.err.strip()}")
    missing = [each for each in imports if each.package in json.loads(done.out)]
    told = {
        each.package: f"{each.where} imports {each.package}, which the nodes do not have: add it to "
        f"Image(pip=[{_distribution(each.package)!r}])."
        for each in sorted(missing, key=lambda each: each.needed)
    }
    if needed := {each.package for each in missing if each.needed}:
        raise InvalidArgument(" ".join(told[name] for name in sorted(needed)))
    return [f"{text} It is needed if that function is called." for text in told.values()]


def _distribution(package: str) -> str:
    return next(iter(metadata.packages_distributions().get(package, ())), package)


def _followed(first: Path, folder: Path, is_program: bool = False) -> Iterator[Import]:
    """Of a file, and of the modules in the folder that it imports."""
    seen, left = {first}, [first]
    while left:
        path = left.pop()
        for name, line, needed in _statements(_parsed(path), is_program and path == first):
            parts = name.lstrip(".").split(".")
            level = len(name) - len(name.lstrip("."))
            here = set(_files(path.parents[level - 1] if level else folder, parts))
            left += here - seen
            seen |= here
            if not here and not level:
                yield Import(parts[0], f"{path.name}, line {line},", needed)


def _files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The files of a module below a folder, with those of its packages."""
    for part in parts:
        found = [path for path in (folder / f"{part}.py", folder / part / "__init__.py") if path.is_file()]
        yield from found
        folder = folder / part


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as exc:
        line = f", line {exc.lineno}" if isinstance(exc, SyntaxError) else ""
        raise InvalidArgument(f"{path}{line}: {getattr(exc, 'msg', exc)}. The run would end with that.") from exc


def _statements(tree: ast.AST, is_program: bool, needed: bool = True) -> Iterator[tuple[str, int, bool]]:
    """Names, lines, and whether they are certainly imported; nothing whose absence is handled."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno, needed) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = "." * level + (module or "")
                inner = f"{base}." if module else base
                yield from ((f"{inner}{alias.name}" if base else alias.name, node.lineno, needed) for alias in names)
            case ast.Try(handlers=[_, *_]) | ast.TryStar():
                pass
            case ast.If(test=test):
                if is_program and any(isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(test)):
                    yield from _statements(node, is_program, needed)
            case ast.FunctionDef(decorator_list=decorators) | ast.AsyncFunctionDef(decorator_list=decorators):
                call = any("compute" in ast.unparse(each) for each in decorators)
                yield from _statements(node, is_program, needed and call)
            case _:
                yield from _statements(node, is_program, needed)


class _Reader(pickle.Unpickler):
    """Collects the modules that a pickle names, without making anything."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return self.modules.add if name == "subimport" else _Anything  # cloudpickle's reference to a module


class _AnyType(type):
    def __call__(cls, *args: Any, **named: Any) -> Any:
        return cls

    def _ignore(cls, *args: Any) -> None:
        pass

    append = extend = add = __setitem__ = __setstate__ = _ignore


class _Anything(metaclass=_AnyType):
    """Stands for any class or function, and its results."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        return cls
