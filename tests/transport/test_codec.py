"""Messages are written and read as their annotations say, and reach the method that handles them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from skyward.transport.codec import (
    Buffers,
    Direction,
    Length,
    Message,
    Receiver,
    Wire,
    Within,
    check,
    decoder,
    handles,
    split,
)
from skyward.transport.frames import Malformed
from skyward.transport.records import replace


class Small(Direction):
    """A link of two kinds."""

    class GoOn(Message):
        """One without buffers."""

        id: str
        seconds: float
        speed: Annotated[int, Within(-1, 3)]
        way: Literal["left", "right"]
        names: list[str] | None
        places: dict[str, tuple[str, int]]

    class Data(Message):
        """One with buffers."""

        id: str
        buffers: list[bytes]


class Ear:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    @handles(Small.GoOn)
    def _go_on(self, message: Small.GoOn, context: int) -> str:
        self.heard.append((message, context))
        return "went"

    @handles(Small.Data)
    def _data(self, message: Small.Data, context: int) -> None:
        self.heard.append((message, context))


GOOD: list[Any] = ["go_on", "a", 2.0, -1, "left", ["n"], {"p": ["h", 1]}, 0]


def test_a_message_is_its_kind_its_fields_and_the_number_of_its_buffers() -> None:
    message = decoder(Small.GoOn)(GOOD, [])
    assert (message.id, message.speed, message.places) == ("a", -1, {"p": ["h", 1]})
    assert message.encoded() == (GOOD, ())
    assert Small.Data("a", [b"1", b"2"]).encoded() == (["data", "a", 2], [b"1", b"2"])


def test_each_message_reaches_the_method_that_handles_it() -> None:
    ear = Ear()
    receiver = Receiver(Small, ear)
    assert receiver.receive(GOOD, [], 7) == "went"
    receiver.receive(["data", "b", 1], [b"1"], 8)
    assert ear.heard == [(decoder(Small.GoOn)(GOOD, []), 7), (Small.Data("b", [b"1"]), 8)]


BAD: dict[int, list[Any]] = {
    1: [None, 1, ["a"]],
    2: [float("nan"), float("inf"), 10**400, "2", True],
    3: [-2, 4, 1.0, True],
    4: ["up", 1, ["left"]],
    5: ["n", [1], {}],
    6: [[], {"p": ["h"]}, {"p": ["h", -1]}, {"p": ["h", 1 << 63]}, {"p": "ab"}],
}


@pytest.mark.parametrize(("at", "value"), [(at, value) for at, values in BAD.items() for value in values])
def test_a_field_that_does_not_fit_its_annotation_is_refused(at: int, value: Any) -> None:
    ear = Ear()
    with pytest.raises(Malformed, match=f"the field {Small.GoOn.__match_args__[at - 1]} of 'go_on'"):
        Receiver(Small, ear).receive([*GOOD[:at], value, *GOOD[at + 1 :]], [], 7)
    assert ear.heard == []


@pytest.mark.parametrize(("at", "value"), [(2, 3), (3, 3), (5, None), (5, []), (6, {"p": ["h", (1 << 63) - 1]})])
def test_a_field_at_its_limit_is_taken(at: int, value: Any) -> None:
    assert Receiver(Small, Ear()).receive([*GOOD[:at], value, *GOOD[at + 1 :]], [], 7) == "went"


def test_a_message_of_another_link_or_length_is_refused() -> None:
    receiver = Receiver(Small, Ear())
    with pytest.raises(Malformed, match="'stop' is not a message of Small"):
        receiver.receive(["stop", "a", 0], [], 7)
    with pytest.raises(Malformed, match="'data' with 2 fields instead of 1"):
        receiver.receive(["data", "a", "b", 0], [], 7)


def test_a_receiver_that_does_not_handle_every_message_is_refused() -> None:
    class Half:
        @handles(Small.Data)
        def _data(self, message: Small.Data) -> None: ...

    with pytest.raises(TypeError, match="nothing handles the messages go_on of Small"):
        Receiver(Small, Half())


class Part(TypedDict):
    name: str
    size: NotRequired[Annotated[int, Within(1, 9)]]


class Ended(Message, kw_only=True):
    """A base: what every end has."""

    id: str
    seconds: Annotated[float | None, Wire("s")] = None


class Well(Ended, kw_only=True, kind="done"):
    parts: list[Part]
    failed: bool = False
    buffers: Annotated[Buffers, Length(1, 2)]

    def validate(self) -> None:
        if self.failed and self.seconds is None:
            raise Malformed("a failure takes time")


def test_fields_that_are_given_by_name_are_an_object_without_its_defaults() -> None:
    message = Well(id="a", parts=[{"name": "x"}], buffers=[b"1"])
    assert message.encoded() == (["done", "a", {"parts": [{"name": "x"}]}, 1], [b"1"])
    changed = replace(message, seconds=2.0)
    assert changed.encoded()[0] == ["done", "a", {"parts": [{"name": "x"}], "s": 2.0}, 1]
    assert decoder(Well)(["done", "a", {"parts": [{"name": "x"}], "s": 2.0, "new": 1}, 1], [b"1"]) == changed


@pytest.mark.parametrize(
    ("metadata", "buffers", "why"),
    [
        ({}, 1, "'done' without parts"),
        ([], 1, "metadata"),
        ({"parts": [{}]}, 1, "'part' without name"),
        ({"parts": [{"name": "x", "size": 0}]}, 1, "the field size of 'part'"),
        ({"parts": [[]]}, 1, "the field parts of 'done'"),
        ({"parts": [], "s": "x"}, 1, "the field seconds of 'done'"),
        ({"parts": []}, 0, "the field buffers of 'done' cannot be 0"),
        ({"parts": []}, 3, "the field buffers of 'done' cannot be 3"),
        ({"parts": [], "failed": True}, 1, "a failure takes time"),
    ],
)
def test_what_does_not_fit_the_object_of_a_message_is_refused_by_name(metadata: Any, buffers: int, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        decoder(Well)(["done", "a", metadata, buffers], [b""] * buffers)


def test_a_sender_can_make_the_tests_of_its_receiver() -> None:
    check(Well(id="a", parts=[{"name": "x", "size": 9}], buffers=[b""]))
    with pytest.raises(Malformed, match="the field size of 'part' cannot be 10"):
        check(Well(id="a", parts=[{"name": "x", "size": 10}], buffers=[b""]))


class Walk(TypedDict):
    do: Literal["walk", "run"]
    steps: int


class Sleep(TypedDict):
    do: Literal["sleep"]


class Act(Message):
    order: Walk | Sleep


def test_one_of_several_objects_is_chosen_by_its_literal() -> None:
    for order in ({"do": "walk", "steps": 3}, {"do": "run", "steps": 0}, {"do": "sleep"}):
        assert decoder(Act)(["act", order, 0], []).order == order
    with pytest.raises(Malformed, match="the field steps of 'walk' cannot be -1"):
        decoder(Act)(["act", {"do": "run", "steps": -1}, 0], [])
    with pytest.raises(Malformed, match="'walk' without steps"):
        decoder(Act)(["act", {"do": "walk"}, 0], [])


@pytest.mark.parametrize("order", [{}, {"do": "fly"}, {"do": []}, {"steps": 1}, [], None, "sleep"])
def test_an_object_with_the_literal_of_none_is_refused(order: Any) -> None:
    with pytest.raises(Malformed, match="the field order of 'act' cannot be"):
        decoder(Act)(["act", order, 0], [])


def test_a_method_that_handles_a_class_handles_its_subclasses() -> None:
    class Ends(Direction):
        Well = Well

    class Judge:
        @handles(Ended)
        def _ended(self, message: Ended) -> str:
            return message.id

    assert Receiver(Ends, Judge()).receive(["done", "a", {"parts": []}, 1], [b""]) == "a"


@pytest.mark.parametrize("bad", ["nonsense", [], ["a"], [1, 0], ["a", True], ["a", -1], ["a", 2], ["a", None]])
def test_good_messages_are_heard_before_one_that_is_none(bad: Any) -> None:
    got = split([["a", 1], bad], [b"1", b"2"])
    assert next(got) == (["a", 1], [b"1"])
    with pytest.raises(Malformed, match="a message"):
        next(got)


def test_a_message_that_is_none_keeps_no_other_of_its_frame_from_being_heard() -> None:
    ear = Ear()
    with pytest.raises(Malformed, match="'stop'"):
        Receiver(Small, ear).receive_all([["data", "a", 1], ["stop", 0], ["data", "b", 1]], [b"1", b"2"], 7)
    assert [message for message, _ in ear.heard] == [Small.Data("a", [b"1"]), Small.Data("b", [b"2"])]
