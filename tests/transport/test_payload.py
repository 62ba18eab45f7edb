"""What travels, how, and what is said of what cannot."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

from skyward.errors import NotSerializable
from skyward.transport.payload import Packer, pack_plain, unpack


class Holder:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def method(self) -> None:
        pass


def back(value: Any, packer: Packer | None = None) -> Any:
    head, buffers = (packer or Packer()).pack(value, "value")
    return unpack(head, [bytearray(b) for b in buffers])


def test_very_many_small_arrays_take_one_buffer_and_come_back_as_they_were() -> None:
    value = [np.arange(600 + number % 5) for number in range(5000)]
    head, buffers = Packer().pack(value, "value")
    assert len(buffers) == 1
    found = unpack(head, [bytearray(buffer) for buffer in buffers])
    assert all(map(np.array_equal, found, value))
    found[4][0] = 7
    assert found[9][0] == 0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module whose file only this computer has."""
    (tmp_path / "only_at_home.py").write_text(
        "FACTOR = 3\ndef helper(x): return FACTOR * x\nclass Thing:\n    def __init__(self, x): self.x = x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("only_at_home")
    sys.modules.pop("only_at_home", None)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1.5,
        "text",
        b"bytes",
        2j,
        range(3),
        (1, [2, {"a": None}]),
        {"k": (1, 2)},
        {1: "one"},
        list(range(1000)),
        {frozenset({1})},
        bytearray(b"x"),
    ],
)
def test_plain_values_come_back_equal(value: Any) -> None:
    again = back(value)
    assert again == value
    assert type(again) is type(value)


def test_functions_of_every_kind_come_back() -> None:
    base = 10
    assert back(lambda x: x + base)(1) == 11
    assert back(functools.partial(pow, 2))(5) == 32
    assert back(len) is len
    assert back(Holder(x=3).method)() is None


def test_large_arrays_travel_beside_the_pickle() -> None:
    array = np.arange(100_000.0)
    head, buffers = Packer().pack({"a": array}, "value")
    assert len(head) < 1000
    assert sum(b.nbytes for b in buffers) == array.nbytes
    assert np.array_equal(unpack(head, buffers)["a"], array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24).reshape(4, 6)[:, ::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", None, 3], dtype=object),
        np.array(5),
        np.zeros((0, 3)),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
    ],
)
def test_arrays_of_every_kind_come_back_equal(array: np.ndarray) -> None:
    again = back(array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert np.array_equal(again, array)


def test_an_array_that_came_back_may_be_changed() -> None:
    again = back(np.zeros(10_000))
    again[0] = 1
    assert again[0] == 1


def test_the_same_object_twice_is_one_object_there() -> None:
    array = np.zeros(10_000)
    first, second = back((array, array))
    assert first is second
    assert len(Packer().pack([array, array], "value")[1]) == 1


def test_a_value_that_contains_itself_comes_back() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    again = back(loop)
    assert again[1] is again
    nest: dict[str, Any] = {}
    nest["self"] = nest
    nested = back(nest)
    assert nested["self"] is nested


def test_a_deep_value_is_sent_or_explained() -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert back(deep) == deep
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotSerializable, match="value"):
        Packer().pack(deep, "value")


def test_what_only_this_computer_has_travels_by_value(home: ModuleType) -> None:
    head, buffers = Packer().pack(home.helper, "function helper")
    head_of_thing, _ = Packer().pack(home.Thing(4), "thing")
    del sys.modules["only_at_home"]
    sys.path_importer_cache.clear()
    sys.path[:] = [p for p in sys.path if not (Path(p) / "only_at_home.py").exists()]
    assert unpack(head, buffers)(2) == 6
    assert unpack(head_of_thing, []).x == 4


def test_what_the_other_side_has_travels_by_name(home: ModuleType, tmp_path: Path) -> None:
    """Modules of the environment, and of the roots given: includes, and the node's own path."""
    by_name, _ = Packer([str(tmp_path)]).pack(home.helper, "function helper")
    assert b"only_at_home" in by_name
    assert len(by_name) < 80
    assert len(Packer().pack(np.median, "median")[0]) < 100
    assert len(Packer().pack(NotSerializable, "class")[0]) < 100


def test_a_module_that_is_known_by_two_names_is_no_trouble(home: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As expat's are, which everything that reads XML imports."""
    monkeypatch.setitem(sys.modules, "another_name_of_it", home)
    before = cloudpickle.list_registry_pickle_by_value()
    assert b"only_at_home" in Packer().pack(home.helper, "function")[0]
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_packing_leaves_the_users_registrations_alone(home: ModuleType) -> None:
    before = cloudpickle.list_registry_pickle_by_value()
    Packer().pack(home.helper, "function")
    assert cloudpickle.list_registry_pickle_by_value() == before
    cloudpickle.register_pickle_by_value(home)
    try:
        Packer().pack(home.helper, "function")
        assert "only_at_home" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(home)


def test_modules_of_the_users_own_cost_nothing_when_something_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large programs have thousands of them: a step for each, with every call, takes longer than the call."""

    class Thing:
        pass

    thing, packer = Thing(), Packer()
    packer.pack(thing, "thing")

    def steps() -> int:
        seen: list[str] = []
        gc.disable()  # a collection counts as steps where something listens to it
        sys.setprofile(lambda frame, event, arg: seen.append(event))
        try:
            packer.pack(thing, "thing")
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(seen)

    few = steps()
    for number in range(2_000):
        monkeypatch.setitem(sys.modules, f"made_here_{number}", ModuleType(f"made_here_{number}"))
    assert steps() == few


def test_a_module_imported_after_the_first_packing_is_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer = Packer()
    packer.pack(print, "function")
    (tmp_path / "came_later.py").write_text("def f(): return 'later'\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("came_later")
    try:
        assert len(packer.pack(module.f, "function")[0]) > 200
    finally:
        del sys.modules["came_later"]


def test_a_module_that_was_loaded_again_still_travels_by_value(home: ModuleType) -> None:
    """As happens in notebooks: the old module is thrown out and the file imported anew."""
    packer = Packer()
    packer.pack(home.helper, "function")
    del sys.modules[home.__name__]
    again = importlib.import_module(home.__name__)
    assert again is not home
    head, _ = packer.pack(again.helper, "function")
    del sys.modules[home.__name__]
    assert b"FACTOR" in head


def test_threads_may_pack_at_once(home: ModuleType) -> None:
    packer, failed = Packer(), []

    def work() -> None:
        for _ in range(30):
            head, _ = packer.pack(home.helper, "function")
            if len(head) < 100:
                failed.append(len(head))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert "only_at_home" not in cloudpickle.list_registry_pickle_by_value()


LOCK = threading.Lock()


def uses_global() -> Any:
    return LOCK


def outer() -> Any:
    lock = threading.Lock()

    def inner() -> Any:
        return lock

    return inner


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"config": [1, threading.Lock()]}, "value['config'][1]"),
        ((1, Holder(a=Holder(b=threading.Lock()))), "value[1].a.b"),
        (outer(), "closure variable 'lock' of value"),
        (functools.partial(print, 1, end=threading.Lock()), "value['end']"),
        (Holder(guard=threading.Lock()).method, "the object of value.guard"),
        (ValueError("x", threading.Lock()), "value.args[1]"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(value: Any, path: str) -> None:
    """The lock that hides somewhere is found, and what to do about it is said."""
    with pytest.raises(NotSerializable) as caught:
        Packer().pack(value, "value")
    text = str(caught.value)
    assert text.startswith(f"{path} cannot be pickled"), text
    assert "_thread.lock" in text
    assert "inside the function" in text
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_argument_is_named_apart_from_what_is_inside_it() -> None:
    with pytest.raises(NotSerializable, match=r"^argument 0 of C\.m, attribute conn cannot be pickled"):
        Packer().pack(((Holder(conn=threading.Lock()), 1), {}), "arguments of C.m")


def test_a_global_that_cannot_travel_is_named() -> None:
    with pytest.raises(NotSerializable, match="global 'LOCK' of function uses_global"):
        Packer().pack(uses_global, "function uses_global")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ((i for i in range(3)), "Iterator"),
        (threading.RLock(), "Create it inside"),
        (threading.Condition(), "Create it inside"),
    ],
)
def test_the_advice_fits_the_thing(value: Any, advice: str) -> None:
    with pytest.raises(NotSerializable, match=advice):
        Packer().pack([value], "arguments of f")


def test_an_open_file_is_explained(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file, pytest.raises(NotSerializable, match="open the file inside"):
        Packer().pack([file], "arguments of f")


def test_an_error_of_the_users_own_reducer_is_part_of_the_message() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("I stay here")

    with pytest.raises(NotSerializable, match=r"value\[0\].*Stubborn.*ValueError: I stay here"):
        Packer().pack([Stubborn()], "value")


def test_the_search_for_the_culprit_ends_in_time() -> None:
    big = {i: list(range(1000)) for i in range(2_000)}
    with pytest.raises(NotSerializable, match="value"):
        Packer().pack((big, big.copy(), threading.Lock()), "value")


def test_plain_packing_is_ordinary_pickle() -> None:
    head, buffers = pack_plain({"a": 1})
    assert pickle.loads(head) == {"a": 1}
    assert buffers == []


ELSEWHERE = """
from contextlib import contextmanager
from skyward.transport.payload import Packer, unpack

@contextmanager
def greeting(name):
    yield f"hello {name}"

with unpack(*Packer().pack(greeting, "a hook"))("you") as text:
    print(text)
"""


def test_packages_that_lie_on_the_python_path_do_not_travel_as_the_users_own(tmp_path: Path) -> None:
    """As with `pip install --target`: cloudpickle would have pickled itself, without end."""
    shutil.copytree(Path(cloudpickle.__file__).parent, tmp_path / "cloudpickle")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "hello you\n"), done.stderr


def test_packages_of_an_environment_below_this_one_do_not_travel_as_the_users_own(tmp_path: Path) -> None:
    """As with `uv run --with`, and with packages that are links to files of a cache."""
    package = tmp_path / "below" / "lib" / "site-packages" / "laid_below"
    package.parent.mkdir(parents=True)
    cached = tmp_path / "cache" / "laid_below"
    cached.mkdir(parents=True)
    (cached / "__init__.py").write_text("def f(): return 1")
    package.mkdir()
    (package / "__init__.py").symlink_to(cached / "__init__.py")
    packer = Packer()
    assert not packer.is_foreign_file(str(package / "__init__.py"))
    assert packer.is_foreign_file(str(cached / "__init__.py"))
