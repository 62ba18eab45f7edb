"""Records: what they hold, how they are made and compared."""

from __future__ import annotations

import pickle

import pytest

from skyward.transport.records import Record


class Point(Record):
    x: int
    y: int = 2


class Other(Record):
    x: int
    y: int = 2


class Empty(Record):
    pass


def test_fields_are_given_in_order_or_by_name_and_may_have_defaults() -> None:
    assert (Point(1).x, Point(1).y) == (1, 2)
    assert (Point(1, 3).y, Point(y=4, x=1).y) == (3, 4)
    assert repr(Point(1)) == "Point(x=1, y=2)"
    assert repr(Empty()) == "Empty()"


def test_the_first_record_of_a_class_is_made_like_the_next_ones() -> None:
    class Fresh(Record):
        a: int
        b: str = "b"

    assert [(r.a, r.b) for r in (Fresh(b="c", a=1), Fresh(2))] == [(1, "c"), (2, "b")]


@pytest.mark.parametrize("given", [(), (1, 2, 3)])
def test_a_record_without_its_fields_is_refused_with_its_name(given: tuple[int, ...]) -> None:
    for _ in range(2):  # of a class that has made one, and of one that has not
        with pytest.raises(TypeError, match=r"Point\.__init__\(\)"):
            Point(*given)


def test_records_are_equal_if_class_and_fields_are() -> None:
    assert Point(1) == Point(1, 2)
    assert Point(1) != Point(2)
    assert Point(1) != Other(1)
    assert Empty() == Empty()


def test_a_record_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError):
        Point(1).z = 3  # type: ignore[attr-defined]
    assert not hasattr(Point(1), "__dict__")


def test_a_record_is_matched_by_class_and_by_position() -> None:
    match Point(1, 5):
        case Other():
            raise AssertionError
        case Point(x, y):
            assert (x, y) == (1, 5)


def test_a_record_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Point(1, 7))) == Point(1, 7)
