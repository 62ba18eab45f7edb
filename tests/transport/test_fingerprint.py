"""A fingerprint changes when what runs changes, and never because of how it is written or in which process it is."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.api.compute import PendingCompute
from skyward.transport.fingerprint import Fingerprints, Unstable

PROGRAM = '''
"""A program."""
import functools
import logging
import math
from dataclasses import dataclass, field

RATE = {rate}
LAYERS = [8, {layers}]
NAMES = {{"adam", "sgd", "{name}"}}
log = logging.getLogger("x")


def twice(f):
    """Calls f twice."""
    @functools.wraps(f)
    def inner(*args, **kwargs):
        {twice}
    return inner


def deepest(x):
    return x * {deepest}


def helper(x, scale={default}):
    """Helps."""
    total = 0
    for {local} in range(3):
        total += deepest({local}) + scale
    if x:
        pass
    return total + x


@dataclass
class Config:
    width: int = {width}
    names: list = field(default_factory=lambda: [{factory}])

    limit = {attribute}

    def area(self):
        return self.width * self.limit

    @property
    def half(self):
        return self.width / {property}

    @staticmethod
    def make():
        return Config({made})


class Wide(Config):
    def area(self):
        return super().area() + {wide}


def closed({outer}):
    more = {more}
    def inner(y):
        return (y + {outer}) * more
    return inner


add = closed({closed})


{decorator}
def train(item, *rest, seed={seed}, **more):
    """Trains."""
    {comment}
    total = helper(item) + add(item) + RATE + len(NAMES) + sum(LAYERS)
    squares = [{square} * {square} + {constant} for {square} in range(4)]
    keys = sorted(NAMES, key=lambda {key}: (len({key}), {key}))
    with open("x") as f:
        try:
            total += f.read()
        except {exception}:
            log.info("%s", keys)
    config = Wide({keyword}=3)
    def {local_function}(a):
        return a + total + {inner}
    return {local_function}(math.{function}(total)) + config.area() + squares[0] {operator} 2
'''
PLAIN = {
    "rate": "0.1", "layers": "16", "name": "lamb", "twice": "return f(f(*args, **kwargs))", "deepest": "3",
    "default": "7", "local": "i", "width": "5", "factory": "1, 2", "attribute": "9", "property": "2", "made": "4",
    "wide": "1", "outer": "n", "more": "6", "closed": "11", "decorator": "@twice", "seed": "0", "comment": "# nothing",
    "square": "s", "constant": "1", "key": "k", "exception": "OSError", "local_function": "last", "inner": "0",
    "function": "floor", "operator": "+", "keyword": "width",
}  # fmt: skip
HARMLESS = {
    "local": ["j", "number", "zz", "a"], "outer": ["m", "zz", "a"], "square": ["q", "a", "ab"],
    "comment": ["# something else", "", "# a\n    # b\n\n", "'''A text.'''"], "local_function": ["first", "zz", "aa"],
}  # fmt: skip
HARMFUL = {
    "rate": ["0.2", "1", "'0.1'"], "layers": ["17", "16.0", "True"], "name": ["rms", "sgd"], "deepest": ["4", "3.0"],
    "twice": ["return f(*args, **kwargs)"], "default": ["8", "None", "7.0"], "width": ["6", "True"],
    "factory": ["1", "2, 1"], "attribute": ["10", "(9,)"], "property": ["3"], "made": ["5"], "wide": ["2"],
    "more": ["60"], "closed": ["12", "11.0"],
    "decorator": ["", "@functools.lru_cache", "@twice\n@twice"], "seed": ["1", "'0'"],
    "constant": ["2", "-1"], "exception": ["ValueError", "(OSError, ValueError)"], "inner": ["1"],
    "function": ["ceil"], "operator": ["-", "*"], "keyword": ["names"],
    "key": ["each", "a"],  # a parameter may be given by its name
}  # fmt: skip


def module(source: str, name: str = "program", times: int = 1) -> ModuleType:
    """`times` as a cell of a notebook that is executed again."""
    made = ModuleType(name)
    before, sys.modules[name] = sys.modules.get(name), made  # dataclasses look for it there
    try:
        for time in range(times):
            exec(compile(source, f"<{name}-{time}>", "exec"), vars(made))
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
    return made


def version(fn: Callable[..., Any], *args: Any, **extra: Any) -> str:
    return Fingerprints(extra).item(PendingCompute(fn, args or (1,)), "train")[1].id


def content(*args: Any, **kwargs: Any) -> str:
    return Fingerprints().item(PendingCompute(print, args, kwargs), "train")[0]


def reformatted(source: str, chance: random.Random) -> str:
    """The same program with other blank lines and comments, and a line that is broken elsewhere."""
    lines = source.split("\n")
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(3, len(lines))
        lines.insert(at, chance.choice(["", "# a comment", "        # another"]))
    text = "\n".join(lines).replace(
        "total = helper(item) +", chance.choice(["total = helper(item) +", "total=helper( item )+"])
    )
    return text.replace("squares = [", chance.choice(["squares = [", "squares = [\n        "])).replace(
        '"""Trains."""', chance.choice(['"""Trains."""', '"""Trains a model."""', ""])
    )


def test_a_thousand_edits_are_told_apart_from_those_that_change_nothing() -> None:
    chance = random.Random(27)
    original = version(module(PROGRAM.format_map(PLAIN)).train)
    missed: list[str] = []
    for number in range(1000):
        values = dict(PLAIN)
        for name in chance.sample(sorted(HARMLESS), chance.randrange(4)):
            values[name] = chance.choice(HARMLESS[name])
        changed = number % 2 == 1
        edits: list[str] = []
        if changed:
            edits = chance.sample(sorted(HARMFUL), chance.choice((1, 1, 1, 2)))
            for name in edits:
                values[name] = chance.choice(HARMFUL[name])
        source = reformatted(PROGRAM.format_map(values), chance)
        name = chance.choice(["program", "moved.elsewhere", "__main__"])
        found = version(module(source, name, times=chance.choice((1, 1, 2))).train)
        if (found != original) != changed:
            missed.append(f"{number}: {edits or 'nothing'} changed: {values}")
    assert not missed, "\n".join(missed[:5])


def test_the_manifest_names_what_changed() -> None:
    one, other = (
        Fingerprints().item(
            PendingCompute(module(PROGRAM.format_map({**PLAIN, "decorator": "", **edit})).train, (1,)), "train"
        )[1]
        for edit in ({}, {"deepest": "4", "rate": "0.3", "attribute": "8"})
    )
    changed = [path for path in one.manifest if one.manifest[path] != other.manifest.get(path)]
    assert sorted(changed) == ["train > RATE", "train > Wide > (base 0, Config) > limit", "train > helper > deepest"]


def test_extra_values_and_the_version_of_python_are_part_of_the_version() -> None:
    fn = module(PROGRAM.format_map(PLAIN)).train
    assert version(fn, Python="3.11") != version(fn, Python="3.12")
    assert version(fn, data="v1") == version(fn, data="v1") != version(fn, data="v2")


@dataclasses.dataclass
class Point:
    x: float
    y: Any = None


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def cyclic() -> list[Any]:
    made: list[Any] = [Point(1, 2)]
    made.append(made)
    return made


VALUES: list[Callable[[], Any]] = [
    lambda: 1, lambda: True, lambda: 1.0, lambda: "1", lambda: b"1", lambda: (1,), lambda: [1], lambda: {1},
    lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}, lambda: frozenset({"x", "y", "z"}), lambda: None, lambda: -0.0,
    lambda: 0.0, lambda: float("nan"), lambda: range(3), lambda: Point(1), lambda: Point(1.0),
    lambda: Point(1, Point(2)),
    lambda: Colour.RED, lambda: Colour.BLUE, lambda: Slotted(1, 2), lambda: Slotted(2, 1), lambda: np.zeros(3),
    lambda: np.zeros(3, "int64"), lambda: np.zeros((3, 1)), lambda: np.zeros((2, 3)), lambda: np.zeros((2, 3)).T,
    lambda: np.float64(1.0), lambda: np.float32(1.0), lambda: bytearray(b"1"), lambda: cyclic(), lambda: Path("a"),
    lambda: [Point, Slotted], lambda: {Point(1).x: {"a", "b", ("c", 1)}}, lambda: np.arange(200_000),
    lambda: np.arange(200_000)[::2], lambda: bytes(2_000_000), lambda: "x" * 100_000, lambda: len, lambda: np.sum,
    lambda: functools.partial(sorted, reverse=True), lambda: [[[]]], lambda: [[], []], lambda: slice(1, 2), lambda: ...,
    lambda: np.array(["a", "b"], object), lambda: np.random.default_rng(1), lambda: np.random.default_rng(2),
    lambda: sky.Secret("one-secret"), lambda: sky.Secret("two-secrets"), lambda: 10**30, lambda: 1 + 2j,
]  # fmt: skip


def test_values_are_told_apart_by_content_and_equal_ones_are_equal() -> None:
    found = [content(make()) for make in VALUES]
    assert found == [content(make()) for make in VALUES]
    assert len(set(found)) == len(found)


def test_a_secret_is_no_part_of_what_is_kept() -> None:
    _, found = Fingerprints({"resume_with": sky.Secret("hunter2-hunter2")}).item(PendingCompute(print, (1,)), "print")
    assert "hunter2" not in repr(found)


def test_another_process_with_another_hash_seed_finds_the_same() -> None:
    code = """
        from tests.transport import test_fingerprint as t
        print([t.content(make()) for make in t.VALUES])
        program = t.module(t.PROGRAM.format_map(t.PLAIN))
        print(t.version(program.train), t.version(program.train, program.Config()))
    """
    found = in_processes(code)
    assert len(found) == 1
    assert len(next(iter(found))) > 1000


def in_processes(code: str) -> set[str]:
    """What the program prints in three processes with other hash seeds."""
    root = Path(__file__).parents[2]
    return {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }


HASHED = """
import attrs, pydantic

@attrs.frozen
class Hashed:
    rate: float = 1
    names: list = attrs.field(factory=list)

@attrs.frozen
class Other:
    rate: float = attrs.field(default=1, eq={eq})

class Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    names: set[str] = {{'a', 'b'}}

def f(x): return Hashed(), Other(), Frozen()
"""


def test_another_process_finds_the_same_of_classes_that_packages_make() -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("attrs")
    (versions,) = in_processes("""
        from tests.transport import test_fingerprint as t
        print(*(t.version(t.module(t.HASHED.format(eq=eq)).f) for eq in (True, False)))
    """)
    assert len(set(versions.split())) == 2


def keyworded(a: Any, b: Any = 2, *, c: Any = 3, **more: Any) -> None: ...


def test_arguments_count_as_the_function_gets_them() -> None:
    def found(*args: Any, **kwargs: Any) -> str:
        return Fingerprints().item(PendingCompute(keyworded, args, kwargs), "f")[0]

    assert found(1, 5) == found(1, b=5) == found(a=1, b=5) == found(b=5, a=1)
    assert found(1, c=4, d=5) == found(d=5, c=4, a=1)
    assert len({found(1), found(1, 5), found(1, c=5), found(1, d=5), found(5)}) == 5


def test_a_class_among_the_arguments_is_part_of_the_version_and_not_of_the_item() -> None:
    one, other = (module(PROGRAM.format_map({**PLAIN, "attribute": value})) for value in ("9", "10"))
    first, second = (Fingerprints().item(PendingCompute(print, (m.Config(),)), "f") for m in (one, other))
    assert first[0] == second[0]
    assert first[1].id != second[1].id


def test_where_a_class_lies_among_the_arguments_is_no_part_of_the_version() -> None:
    program = module(PROGRAM.format_map(PLAIN))
    prints = Fingerprints()
    found = [prints.item(PendingCompute(print, (a,)), "f")[1].id for a in (program.Config(), [1, program.Config()])]
    assert found[0] == found[1]


def test_items_that_refer_to_each_other_count_in_any_order() -> None:
    def found(order: int) -> set[str]:
        one, other = Point(1), Point(2)
        one.y, other.y = other, one
        prints = Fingerprints()
        return {prints.item(PendingCompute(print, (each,)), "f")[0] for each in (one, other)[::order]}

    assert found(1) == found(-1)


def test_functions_of_the_same_name_in_two_packages_are_told_apart() -> None:
    source = "from {package} import sqrt\ndef f(x): return sqrt(x)"
    assert len({version(module(source.format(package=package)).f) for package in ("math", "cmath", "numpy")}) == 3


def test_static_and_class_methods_are_told_apart() -> None:
    source = "class A:\n    @{kind}\n    def make(a=1): return a\ndef f(x): return A.make()"
    assert len({version(module(source.format(kind=kind)).f) for kind in ("staticmethod", "classmethod")}) == 2


def test_functions_in_a_set_count_in_any_order() -> None:
    source = "def f(x): return chosen\nchosen = {{lambda: {a}, lambda: {b}}}"
    found = [version(module(source.format(a=a, b=b)).f) for a, b in ((1, 2), (2, 1), (2, 3))]
    assert found[0] == found[1] != found[2]


def test_a_docstring_of_a_class_within_a_function_is_no_part_of_the_version() -> None:
    source = "def f(x):\n    class A:\n        {text}\n        y = 1\n    return A"
    assert len({version(module(source.format(text=text)).f) for text in ("'A text.'", "'Another.'", "pass")}) == 1


def test_functions_of_the_same_name_are_told_apart() -> None:
    found = [Fingerprints().item(PendingCompute(print, (fn,)), "f") for fn in (lambda x: x + 1, lambda x: x + 2)]
    assert found[0][1].id != found[1][1].id


class Opened:
    def __init__(self) -> None:
        self.handle = threading.Lock()


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([1, {"a": Opened()}], r"argument 0 of f, at \[1\]\['a'\].handle is a _thread.lock"),
        (iter([1]), "argument 0 of f is an iterator, which can be read once"),
        (numbers(), "iterator"),
        (open(os.devnull), "iterator"),  # noqa: SIM115 - refused before anything reads it
    ],
)
def test_what_has_no_content_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(Unstable, match=path):
        Fingerprints().item(PendingCompute(print, (value,)), "f")


class Different:
    """Pickled, it is another one each time."""

    count = 0

    def __reduce__(self) -> Any:
        Different.count += 1
        return list, ([Different.count],)


def test_what_changes_when_it_is_pickled_is_refused_with_its_path() -> None:
    with pytest.raises(Unstable, match=r"argument 0 of f, at \['x'\].* differs from a pickled copy"):
        Fingerprints().item(PendingCompute(print, ({"x": Different()},)), "f")


def test_a_lock_that_the_code_refers_to_is_refused_with_its_path() -> None:
    program = module(
        "import threading\nlock = threading.Lock()\ndef helper():\n    with lock: pass\ndef f(x): helper()"
    )
    with pytest.raises(Unstable, match=r"train > helper > lock is a _thread\.lock"):
        version(program.f)


def test_wrappers_of_packages_count_by_what_they_wrap() -> None:
    source = (
        "import functools, contextlib\n"
        "@functools.lru_cache\ndef cached(x): return x + {a}\n"
        "@functools.singledispatch\ndef chosen(x): return {b}\n"
        "@chosen.register\ndef _(x: int): return {c}\n"
        "@contextlib.contextmanager\ndef opened(): yield {d}\n"
        "part = functools.partial(cached, {e})\n"
        "def f(x):\n    with opened() as o: return cached(x) + chosen(x) + part()"
    )
    plain = dict.fromkeys("abcde", 1)
    first = version(module(source.format_map(plain)).f)
    assert first == version(module(source.format_map(plain), "other").f)
    for name in plain:
        assert version(module(source.format_map({**plain, name: 2})).f) != first, name


def test_a_decorator_made_with_wrapt_counts_as_what_it_decorates_does() -> None:
    pytest.importorskip("wrapt")
    source = (
        "import wrapt\n@wrapt.decorator\ndef more(fn, instance, args, kwargs): return fn(*args, **kwargs) + {a}\n"
        "@more\ndef helper(x): return x + {b}\ndef f(x): return helper(x)"
    )
    found = {version(module(source.format(a=a, b=b)).f) for a, b in ((1, 1), (2, 1), (1, 2), (1, 1))}
    assert len(found) == 3


def test_an_object_that_has_every_attribute_is_no_wrapper() -> None:
    class Lazy:
        """As the values of dask.delayed."""

        def __call__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return Lazy()

        def __reduce__(self) -> Any:
            return Lazy, ()

    Lazy.__module__ = "numpy"  # of a package
    made = module("def f(x): return lazy")
    vars(made)["lazy"] = Lazy()
    assert version(made.f) == version(made.f)


def test_an_attribute_with_the_address_of_its_function_is_no_part_of_the_version() -> None:
    source = "def f(x): return x\nf.scale = {0}\nf.wrapper_id = id(f)"  # as torch.compile does
    first = version(module(source.format(1)).f)
    assert first == version(module(source.format(1)).f)
    assert first != version(module(source.format(2)).f)


def test_a_module_of_the_user_counts_by_what_is_read_of_it() -> None:
    def program(**values: int) -> Callable[..., Any]:
        tools = module(
            "def used(x): return x + {used}\ndef other(x): return x + {other}\n".format_map(
                {"used": 1, "other": 1, **values}
            )
        )
        made = module("def f(x): return tools.used(x)\ndef whole(x): return getattr(tools, x)")
        vars(made)["tools"] = tools
        return made

    assert version(program().f) == version(program(other=2).f) != version(program(used=2).f)
    assert version(program().whole) != version(program(other=2).whole)


def test_a_module_that_a_body_imports_counts_as_its_file_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = tmp_path / "resumed_package"
    package.mkdir()
    files = {"__init__": "", "deep": "def f(): return 1", "tool": "from resumed_package.deep import f"}
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    fn = module("def f(x):\n    from resumed_package import tool\n    return tool.f()").f

    first = version(fn)
    (package / "deep.py").write_text("# a comment, longer than it was\n\ndef f():\n    return 1")
    assert version(fn) == first
    (package / "deep.py").write_text("# a comment\n\ndef f():\n    return 1 + 1 + 1")
    assert version(fn) != first


def test_the_packages_of_a_module_that_a_body_imports_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "outer_package" / "inner").mkdir(parents=True)
    for name in ("__init__", "inner/__init__", "inner/tool"):
        (tmp_path / "outer_package" / f"{name}.py").write_text("def f(): return 1")
    fn = module("def f(x):\n    import outer_package.inner.tool\n    return outer_package.f()").f
    versions = {version(fn)}
    for name in ("__init__", "inner/__init__", "inner/tool"):
        (tmp_path / "outer_package" / f"{name}.py").write_text("def f(): return 1 + 1 + 1")
        versions.add(version(fn))
    assert len(versions) == 4


def test_a_function_compiled_by_jax_counts_by_its_code() -> None:
    """In a process of its own: jax warns of every fork after it."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    program = """
        from tests.transport.test_fingerprint import module, version
        source = "import jax\\n@jax.jit\\ndef step(x): return x * {0}\\ndef f(x): return step(x)"
        print(*(version(module(source.format(number)).f) for number in (1, 1, 2)))
        """
    command, root = [sys.executable, "-c", textwrap.dedent(program)], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=True)
    one, same, other = done.stdout.split()
    assert one == same != other


def test_classes_that_packages_make_count_by_what_their_fields_are() -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("attrs")
    source = (
        "import functools\nimport attrs, pydantic\n"
        "class Limited(pydantic.BaseModel):\n    rate: float = {a}\n    size: int = pydantic.Field(3, gt={b})\n"
        "    names: list = pydantic.Field(default_factory=lambda: [{c}])\n"
        "@attrs.define\nclass Defined:\n    rate: float = {d}\n"
        "    size: int = attrs.field(default=3, converter=lambda size: size + {e})\n"
        "class Called:\n    __call__ = functools.partial(lambda more, x: x + more, {f})\n"
        "def f(x): return Limited(), Defined(), Called()(x)"
    )
    plain = dict.fromkeys("abcdef", 1)
    first = version(module(source.format_map(plain)).f)
    assert first == version(module(source.format_map(plain)).f)
    for name in plain:
        assert version(module(source.format_map({**plain, name: 2})).f) != first, name


def test_recursive_functions_and_classes_that_name_each_other_have_a_version() -> None:
    source = (
        "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != {a} and even(n - 1)\n"
        "class A:\n    def b(self): return B()\n"
        "class B(A):\n    x = {a}\ndef f(x): return even(x), A()"
    )
    found = [version(module(source.format(a=a)).f) for a in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_a_plain_item_takes_no_visit_and_a_large_array_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = Fingerprints()
    visits = []
    apart = Fingerprints._apart  # pyright: ignore[reportPrivateUsage] - what it costs is to be counted
    monkeypatch.setattr(Fingerprints, "_apart", lambda self, value: visits.append(value) or apart(self, value))
    prints.item(PendingCompute(print, (0,)), "f")
    visits.clear()
    for number in range(100):
        prints.item(PendingCompute(print, ((number, {"rate": 0.1, "names": ["a", "b"]}),)), "f")
    assert not visits
    array = np.arange(1_000_000)
    for number in range(20):
        prints.item(PendingCompute(print, (array, number)), "f")
    assert sum(isinstance(value, np.ndarray) for value in visits) <= 4  # three of them are copies, to be compared
