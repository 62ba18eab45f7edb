"""Who reads a runner's socket, in every order that threads can run: no message is lost, none is heard twice."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.node.runner import Turn

AWAKE = "awake"
Story = tuple[str, ...]


class World:
    """A runner's two threads, each between two of its steps, and the socket between it and the agent.

    Messages: "call" runs a body; "waiting call" one that ends when it has heard an "answer"; "asking call" one that
    sends something first; "recalled call" none, as it was given back.
    """

    def __init__(self, story: Story, turn: type[Turn]) -> None:
        self.turn: Turn = turn()
        self.to_come, self.arrived = story, 0
        self.heard: list[str] = []
        self.queue: list[str] = []
        self.main, self.helper = "idle", "reading"  # as while hooks are entered
        self.alarm = self.asks = False
        self.body = ""
        self.ended = 0

    @property
    def done(self) -> bool:
        calls = sum("call" in message for message in self.to_come)
        return tuple(self.heard) == self.to_come and self.ended == calls and self.main in ("reading", "waiting")

    def key(self) -> Any:
        turn = self.turn
        mine = turn.helps, turn.running, turn._waits, turn._body == turn._seen, turn._rests, turn._hurries
        return (
            mine, self.arrived, tuple(self.heard), tuple(self.queue), self.main, self.helper, self.alarm, self.asks,
            self.body, self.ended,
        )  # fmt: skip

    def copied(self) -> World:
        turn, self.turn = self.turn, None  # type: ignore[assignment] - a lock cannot be copied
        made = copy.copy(self)
        made.heard, made.queue = list(self.heard), list(self.queue)
        made.turn = object.__new__(type(turn))
        made.turn.__dict__.update(turn.__dict__, _lock=threading.Lock())
        self.turn = turn
        return made

    def steps(self) -> Iterator[str]:
        """What can happen next."""
        if self.arrived < len(self.to_come):
            yield "arrive"
        unheard = len(self.heard) < self.arrived
        if self.main in ("idle", "may read", "begin", "ask") or (self.main == "reading" and unheard):
            yield "main"
        if self.main == "waiting" and self.queue:
            yield "main"
        if self.main == "body" and (self.body != "waiting call" or self._is_answered()):
            yield "main"
        if self.helper == "reading" and unheard:
            yield "helper"
        if self.helper in ("heard", "ticking") or (self.helper == "resting" and self.alarm):
            yield "helper"

    def _is_answered(self) -> bool:
        waiting = [at for at, message in enumerate(self.heard) if message == "waiting call"]
        return "answer" in self.heard[waiting[0] :]

    def take(self, step: str) -> None:
        if step == "arrive":
            self.arrived += 1
        else:
            getattr(self, f"_{step}")()
        assert not (self.main == "reading" and self.helper == "reading"), "two threads read one socket"

    def _hear(self) -> None:
        message = self.to_come[len(self.heard)]
        self.heard.append(message)
        if "call" in message:
            self.queue.append(message)

    def _main(self) -> None:
        match self.main:
            case "idle":
                self.main = "may read" if self.turn.may_read() else "waiting"
            case "may read" if not self.queue:
                self.main = "reading"
            case "may read" | "waiting":
                taken = self.queue.pop(0)
                self.ended += taken == "recalled call"
                self.main, self.body = ("idle", "") if taken in (AWAKE, "recalled call") else ("begin", taken)
            case "begin":
                self.alarm = self.turn.begin() or self.alarm
                self.main = "ask" if self.body == "asking call" else "body"
            case "ask":
                self.alarm = self.turn.hurry() or self.alarm
                self.main = "body"
            case "body":
                self.ended += 1
                self.main, self.body = "idle", ""
            case _:
                self._hear()
                self.main = "idle"

    def _helper(self) -> None:
        match self.helper:
            case "reading":
                self._hear()
                self.helper = "heard"
            case "heard":
                back = self.turn.hand_back()
                if back:
                    self.queue.append(AWAKE)
                self.helper = "ticking" if back else "reading"
            case _:  # after a tick, or the alarm
                self.alarm = False
                self.helper = {"read": "reading", "rest": "resting", "again": "ticking"}[self.turn.look()]


def explore(story: Story, turn: type[Turn] = Turn) -> int:
    """Takes every step in every state; how many there are. From each of them all messages can still be heard."""
    first = World(story, turn)
    known: dict[Any, set[Any]] = {first.key(): set()}
    ends, waiting = set[Any](), deque([first])
    while waiting:
        world = waiting.popleft()
        if world.done:
            ends.add(world.key())
        for step in world.steps():
            after = world.copied()
            after.take(step)
            if after.key() not in known:
                known[after.key()] = set()
                waiting.append(after)
            known[after.key()].add(world.key())  # from where it is reached
    reaches, waiting_keys = set(ends), deque(ends)
    while waiting_keys:
        for key in known[waiting_keys.popleft()] - reaches:
            reaches.add(key)
            waiting_keys.append(key)
    lost = [key for key in known if key not in reaches]
    assert not lost, f"{len(lost)} of {len(known)} states lead nowhere, such as {lost[0]}"
    return len(known)


STORIES: list[Story] = [
    ("call",),
    ("call", "call", "call", "call"),
    ("waiting call", "answer", "call", "call"),
    ("call", "waiting call", "call", "answer", "call"),
    ("call", "recalled call", "call", "recalled call", "recalled call", "call"),
    ("other", "call", "other", "asking call", "other", "waiting call", "answer"),
]


@pytest.mark.parametrize("story", STORIES, ids=" ".join)
def test_every_message_is_heard_by_one_thread_in_whatever_order_they_run(story: Story) -> None:
    assert explore(story) > 10 * len(story)


class RestsTooSoon(Turn):
    """Goes to sleep without a look at whether a body runs."""

    def look(self) -> Any:
        with self._lock:
            self._rests = True
        return "rest"


class ReadsAlways(Turn):
    def may_read(self) -> bool:
        super().may_read()
        return True


class DoesNotWake(Turn):
    def begin(self) -> bool:
        super().begin()
        return False


@pytest.mark.parametrize("broken", [RestsTooSoon, ReadsAlways, DoesNotWake])
def test_the_model_finds_what_is_broken(broken: type[Turn]) -> None:
    with pytest.raises(AssertionError, match=r"two threads read|lead nowhere"):
        for story in STORIES:
            explore(story, broken)


def test_a_short_body_is_over_before_the_helper_reads_and_a_long_one_is_not() -> None:
    turn = Turn()
    assert not turn.may_read(), "hooks are being entered"
    assert turn.hand_back()
    assert turn.look() == "rest"
    assert turn.may_read()
    assert turn.begin(), "the helper rests, and must look after a while"
    assert turn.look() == "again"
    for _ in range(100):  # short ones
        assert turn.may_read()
        assert not turn.begin()
        assert turn.look() == "again"
    assert turn.look() == "read"
    assert not turn.may_read()
    assert turn.hand_back()
    assert turn.may_read()


def test_a_body_that_asks_has_the_helper_read_at_once() -> None:
    turn = Turn()
    turn.may_read()
    turn.hand_back()
    turn.begin()
    assert turn.hurry()
    assert turn.look() == "read"
    assert not turn.hurry(), "it reads"
