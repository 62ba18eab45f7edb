"""Objects whose classes only this computer has: a class is made once, and again when anything of it changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, Optional

import pytest

import skyward as sky
from skyward.transport import classes

SCALE = 2


@dataclass
class Point:
    x: float
    y: float = 0.0
    names: list[str] = field(default_factory=lambda: list[str]())

    count: ClassVar[int] = 0

    def scaled(self) -> float:
        return self.x * SCALE

    def moved(self) -> Point:
        return Point(self.x + 1, self.y)


class Plain:
    known: ClassVar[list[int]] = []

    def __init__(self, value: int) -> None:
        self.value = value


@sky.compute
def ask(value: Any, question: str) -> Any:
    return eval(question, {"it": value, "type": type})


@sky.compute
def counted(point: Point) -> int:
    type(point).count += 1
    return type(point).count


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=1, console=False) as pool:
        yield pool


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The classes of this file, as they are written here."""
    kept = {cls: dict(vars(cls)) for cls in (Point, Plain)}
    yield
    globals()["SCALE"] = 2
    Plain.known.clear()
    for cls, attributes in kept.items():
        for name in vars(cls).keys() - attributes.keys():
            delattr(cls, name)
        for name in ("count", "scaled", "known"):
            if name in attributes:
                setattr(cls, name, attributes[name])


def test_what_comes_back_has_the_class_of_this_program(pool: sky.ComputePool) -> None:
    for _ in range(3):
        back = ask(Point(1.0), "it.moved()") >> pool
        assert type(back) is Point
        assert back == Point(2.0)


def test_a_node_makes_a_class_once(pool: sky.ComputePool) -> None:
    assert len({ask(Point(1.0), "id(type(it).scaled)") >> pool for _ in range(3)}) == 1


def test_a_method_that_is_replaced_is_sent_again(pool: sky.ComputePool) -> None:
    assert ask(Point(3.0), "it.scaled()") >> pool == 6
    Point.scaled = lambda self: -1.0  # type: ignore[method-assign]
    assert ask(Point(3.0), "it.scaled()") >> pool == -1
    Point.more = 7  # type: ignore[attr-defined]
    assert ask(Point(3.0), "it.more") >> pool == 7


def test_a_method_sees_what_a_name_of_its_module_means_now(pool: sky.ComputePool) -> None:
    assert ask(Point(3.0), "it.scaled()") >> pool == 6
    globals()["SCALE"] = 10
    assert ask(Point(3.0), "it.scaled()") >> pool == 30


def test_a_list_of_a_class_is_sent_as_it_is_now(pool: sky.ComputePool) -> None:
    assert ask(Plain(1), "it.known") >> pool == []
    Plain.known.append(5)
    assert ask(Plain(1), "it.known") >> pool == [5]


def test_what_a_body_changes_of_a_class_is_not_there_in_the_next(pool: sky.ComputePool) -> None:
    assert [counted(Point(1.0)) >> pool for _ in range(3)] == [1, 1, 1]
    assert Point.count == 0


def test_a_class_that_is_defined_again_is_another(pool: sky.ComputePool) -> None:
    def define(value: int) -> Any:
        @dataclass
        class Made:
            x: int

            def answer(self) -> int:
                return self.x + value

        return Made

    first, second = define(1), define(100)
    for _ in range(2):
        assert ask(first(1), "it.answer()") >> pool == 2
        assert ask(second(1), "it.answer()") >> pool == 101


@pytest.mark.parametrize("kind", ["frozen", "slots", "inherited", "keyed"])
def test_dataclasses_of_all_kinds_are_sent_once(pool: sky.ComputePool, kind: str) -> None:
    options: dict[str, Any] = {"frozen": {"frozen": True, "order": True}, "slots": {"slots": True}}.get(kind, {})
    base: type = Exception if kind == "inherited" else object

    @dataclass(**options)
    class Made(base):  # type: ignore[misc, valid-type]
        x: int | None
        y: list[float] = field(default_factory=list, metadata={"unit": "m"}, kw_only=kind == "keyed")

        @property
        def both(self) -> tuple[Any, ...]:
            return self.x, *self.y

        @staticmethod
        def here() -> int:
            return os.getpid()

        @classmethod
        def made(cls) -> Any:
            return cls(0)

    assert [ask(Made(1, y=[2.0]), "it.both, it.made().x, it.here()") >> pool for _ in range(2)][1][:2] == ((1, 2.0), 0)
    sent = pool._sender.packing._packer._classes
    assert sent is not None
    assert sent._known[Made] is not None


def test_annotations_that_are_no_texts_are_known(pool: sky.ComputePool) -> None:
    fields: list[Any] = [("x", Optional[int]), ("y", int | None), ("z", list[float]), ("n", ClassVar[int], 3)]  # noqa: UP045
    made: Any = make_dataclass("Made", fields, namespace={"__module__": __name__})
    assert ask(made(1, None, [2.0]), "it.z, it.n") >> pool == ([2.0], 3)
    sent = pool._sender.packing._packer._classes
    assert sent is not None
    assert sent._known[made] is not None


def test_a_class_with_a_part_that_may_change_unseen_is_sent_every_time(pool: sky.ComputePool) -> None:
    class Box:
        inside = Plain(1)

    assert ask(Box(), "it.inside.value") >> pool == 1
    Box.inside.value = 2
    assert ask(Box(), "it.inside.value") >> pool == 2


def test_what_a_class_refers_to_is_not_followed_without_end() -> None:
    class Large:
        table: ClassVar[list[int]] = list(range(10_000))

    assert len(classes._parts_of(Large)) < 3 * len(Large.table)
    assert classes.Classes(lambda cls: b"").reduced(Large) is None
