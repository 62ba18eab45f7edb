"""Each message reaches the method of its kind, with its fields; a receiver that does not fit its link is refused."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.node.receiver import Direction, Malformed, Message, Receiver, split


class Small(Direction):
    """A link of three kinds."""

    sender = "client"
    verdicts = ("done", "error")

    @staticmethod
    def go(id: str, seconds: float) -> Message:
        return ["go", id, seconds, 0]

    @staticmethod
    def data(id: str, buffers: int) -> Message:
        return ["data", id, buffers]

    @staticmethod
    def verdict(kind: str, id: str, buffers: int) -> Message:
        return [kind, id, buffers]


class Ear:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def _from_client_go(self, context: int, id: str, seconds: float) -> str:
        self.heard.append(("go", context, id, seconds))
        return "went"

    def _from_client_data(self, context: int, id: str, buffers: list[Any]) -> None:
        self.heard.append(("data", context, id, buffers))


class Judge:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def _from_client_verdict(self, context: int, kind: str, id: str, buffers: list[Any]) -> None:
        self.heard.append((kind, context, id, buffers))


def test_each_message_reaches_its_method_wherever_that_is() -> None:
    ear, judge = Ear(), Judge()
    receiver = Receiver(Small, ear, judge)
    assert receiver.hear(Small.go("a", 2.0), [], 7) == "went"
    receiver.hear_all([Small.data("b", 2), Small.verdict("error", "c", 0), Small.data("d", 1)], [b"1", b"2", b"3"], 7)
    assert ear.heard == [("go", 7, "a", 2.0), ("data", 7, "b", [b"1", b"2"]), ("data", 7, "d", [b"3"])]
    assert judge.heard == [("error", 7, "c", [])]


def test_a_kind_that_the_link_does_not_have_is_an_error() -> None:
    receiver = Receiver(Small, Ear(), Judge())
    for kind in ("stop", "verdict", "lost"):
        with pytest.raises(ValueError, match=f"'{kind}' is not a message of Small"):
            receiver.hear([kind, "a", 0], [], 7)


def test_a_message_without_all_its_fields_is_an_error() -> None:
    with pytest.raises(Malformed, match="1 fields instead of 2"):
        Receiver(Small, Ear(), Judge()).hear(["go", "a", 0], [], 7)


@pytest.mark.parametrize(
    "message", [["go", 1, 2.0, 0], ["go", "a", "b", 0], ["go", "a", float("nan"), 0], ["data", [], 0]]
)
def test_a_message_with_fields_of_other_types_is_an_error(message: list[Any]) -> None:
    ear = Ear()
    with pytest.raises(Malformed, match="field"):
        Receiver(Small, ear, Judge()).hear(message, [], 7)
    assert ear.heard == []


def test_a_message_that_is_none_keeps_no_other_of_its_frame_from_being_heard() -> None:
    ear = Ear()
    with pytest.raises(Malformed, match="'stop'"):
        Receiver(Small, ear, Judge()).hear_all([["go", "a", 1, 0], ["stop", 0], ["go", "b", 2, 0]], [], 7)
    assert [heard[2] for heard in ear.heard] == ["a", "b"]


def test_a_receiver_without_a_method_for_a_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="_from_client_verdict"):
        Receiver(Small, Ear())


def test_a_receiver_with_a_method_for_no_kind_is_refused() -> None:
    class Other(Judge):
        def _from_client_stop(self) -> None: ...

    with pytest.raises(TypeError, match="_from_client_stop"):
        Receiver(Small, Ear(), Other())


def test_a_receiver_whose_method_has_other_fields_is_refused() -> None:
    class Swapped(Judge):
        def _from_client_data(self, context: int, id: str, buffers: list[Any]) -> None: ...
        def _from_client_go(self, context: int, seconds: float, id: str) -> None: ...

    with pytest.raises(TypeError, match=r"_from_client_go does not have the fields of Small\.go"):
        Receiver(Small, Swapped())


@pytest.mark.parametrize(
    "bad", ["nonsense", [], ["done"], [1, 0], ["done", True], ["done", -1], ["done", 2], ["done", None]]
)
def test_good_messages_are_heard_before_one_that_is_none(bad: Any) -> None:
    got = split([["a", 1], bad], [b"1", b"2"])
    assert next(got) == (["a", 1], [b"1"])
    with pytest.raises(ValueError, match="a message"):
        next(got)


def test_a_frame_that_is_no_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="a frame"):
        next(split({"a": 1}, []))
