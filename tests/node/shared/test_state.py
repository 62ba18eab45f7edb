"""What the shared collections of a pool answer, question by question: logic alone, in a time that is passed in."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.node.shared.state import KINDS, ROOM, SharedState

RANKS = 3


class World:
    """Ranks 0 to 2 and the client, whose answers are collected."""

    def __init__(self) -> None:
        self.state = SharedState("e1", RANKS)
        self.now = 100.0
        self.asked = 0
        for rank in range(RANKS):
            self.state.open(f"r{rank}", f"rank {rank}", rank)
        self.state.open("client", "the client", None)

    def ask(
        self,
        asker: str,
        kind: str,
        operation: str,
        *arguments: Any,
        values: tuple[bytes, ...] = (),
        timeout: float | None = None,
        name: str = "x",
        epoch: str = "",
    ) -> list[tuple[Any, ...]]:
        """Who is answered what: (asker, code, result, *values)."""
        self.asked += 1
        return self.told(
            self.state.ask(
                asker, self.asked, epoch, kind, name, operation, list(arguments), timeout, list(values), self.now
            )
        )

    def told(self, answers: list[Any]) -> list[tuple[Any, ...]]:
        return [(asker, message[3], message[4], *values) for asker, message, values in answers]

    def tick(self, seconds: float) -> list[tuple[Any, ...]]:
        self.now += seconds
        return self.told(self.state.tick(self.now))

    def gone(self, asker: str) -> list[tuple[Any, ...]]:
        return self.told(self.state.gone(asker, "its process has ended", self.now))


@pytest.fixture
def world() -> World:
    return World()


# each step: asker, operation, arguments, values -> the answers, all to that asker
DICT = [
    ("r0", "get", ["'a'"], (), ("", 0)),
    ("r0", "set", ["'a'"], (b"1",), ("", None)),
    ("r1", "get", ["'a'"], (), ("", 1, b"1")),
    ("r1", "setdefault", ["'a'"], (b"2",), ("", False, b"1")),
    ("r1", "setdefault", ["'b'"], (b"2",), ("", True)),
    ("r2", "swap", ["'a'", 1], (b"3",), ("", True)),
    ("r0", "swap", ["'a'", 1], (b"4",), ("", False)),
    ("r0", "swap", ["'c'", 0], (b"5",), ("", True)),
    ("r0", "keys", [], (), ("", None, b"'a'\n'b'\n'c'")),
    ("r0", "items", [], (), ("", None, b"'a'\n'b'\n'c'", b"3", b"2", b"5")),
    ("r0", "update", [], (b"'a'\n'd'", b"6", b"7"), ("", None)),
    ("r0", "contains", ["'d'"], (), ("", True)),
    ("r0", "pop", ["'d'"], (), ("", True, b"7")),
    ("r1", "pop", ["'d'"], (), ("", False)),
    ("r1", "len", [], (), ("", 3)),
    ("r1", "clear", [], (), ("", None)),
    ("r1", "len", [], (), ("", 0)),
]
SET = [
    ("r0", "keys", [], (), ("", None, b"")),
    ("r0", "add", [], (b"",), ("", 0)),
    ("r0", "add", [], (b"1",), ("", 1)),
    ("r1", "add", [], (b"1",), ("", 0)),
    ("r1", "add", [], (b"1\n2\n2\n3",), ("", 2)),
    ("r0", "contains", ["3"], (), ("", True)),
    ("r0", "discard", ["3"], (), ("", True)),
    ("r0", "discard", ["3"], (), ("", False)),
    ("r0", "keys", [], (), ("", None, b"1\n2")),
    ("r0", "pop", [], (), ("", ["1"])),
    ("r0", "len", [], (), ("", 1)),
    ("r0", "clear", [], (), ("", None)),
    ("r0", "pop", [], (), ("", [])),
]
COUNTER = [
    ("r0", "add", [1], (), ("", 1)),
    ("r1", "add", [5], (), ("", 6)),
    ("r1", "set", [2], (), ("", 6)),
    ("r1", "add", [-3], (), ("", -1)),
    ("r1", "set", [2**63 - 1], (), ("", -1)),
    ("r1", "add", [1], (), ("argument", "counter 'x' was not changed: it takes whole numbers of up to 64 bits.")),
    ("r1", "set", [1.5], (), ("argument", "counter 'x' was not changed: it takes whole numbers of up to 64 bits.")),
    ("r1", "set", [0], (), ("", 2**63 - 1)),
]
QUEUE = [
    ("r0", "put", [2], (b"a",), ("", None)),
    ("r0", "put", [None], (b"b",), ("", None)),
    ("r0", "len", [], (), ("", 2)),
    ("r1", "get", [None], (), ("", None, b"a")),
    ("r1", "unget", [], (b"a",), ("", None)),
    ("r2", "get", [2], (), ("", None, b"a")),
    ("r2", "clear", [], (), ("", 1)),
]
EVENT = [
    ("r0", "is_set", [], (), ("", False)),
    ("r0", "set", [], (), ("", None)),
    ("r1", "wait", [], (), ("", None)),
    ("r0", "clear", [], (), ("", None)),
    ("r1", "is_set", [], (), ("", False)),
]


@pytest.mark.parametrize(
    ("kind", "steps"), [("dict", DICT), ("set", SET), ("counter", COUNTER), ("queue", QUEUE), ("event", EVENT)]
)
def test_operations_that_do_not_wait(world: World, kind: str, steps: list[Any]) -> None:
    for asker, operation, arguments, values, expected in steps:
        answers = world.ask(asker, kind, operation, *arguments, values=values)
        assert answers == [(asker, *expected)], (operation, arguments)
    assert world.state.waiting == 0


def test_an_item_goes_to_whoever_has_waited_longest_and_to_nobody_else(world: World) -> None:
    assert world.ask("r1", "queue", "get", None) == []
    assert world.ask("r2", "queue", "get", None) == []
    assert world.ask("r0", "queue", "put", None, values=(b"a",)) == [("r0", "", None), ("r1", "", None, b"a")]
    assert world.ask("r0", "queue", "put", None, values=(b"b",)) == [("r0", "", None), ("r2", "", None, b"b")]
    assert world.ask("r0", "queue", "len") == [("r0", "", 0)]


def test_a_full_queue_lets_putters_wait_and_keeps_their_order(world: World) -> None:
    world.ask("r0", "queue", "put", 1, values=(b"a",))
    assert world.ask("r1", "queue", "put", None, values=(b"b",)) == []
    assert world.ask("r2", "queue", "put", None, values=(b"c",)) == []
    assert world.ask("client", "queue", "get", None) == [("client", "", None, b"a"), ("r1", "", None)]
    assert world.ask("client", "queue", "get", None) == [("client", "", None, b"b"), ("r2", "", None)]
    assert world.ask("client", "queue", "get", None) == [("client", "", None, b"c")]


def test_time_outs_say_what_was_waited_for(world: World) -> None:
    world.ask("r0", "queue", "get", 1, timeout=2)
    assert world.tick(1) == []
    [(asker, code, text)] = world.tick(1.5)
    assert (asker, code, text) == ("r0", "timeout", "queue 'x' was empty for 2 s.")
    world.ask("r0", "queue", "put", 1, values=(b"a",))
    world.ask("r1", "queue", "put", 1, values=(b"b",), timeout=3)
    world.ask("r2", "queue", "put", 1, values=(b"c",), timeout=9)
    [(_, code, text)] = world.tick(3)
    assert text == "queue 'x' was full for 3 s: it has 1 of 1 items; 1 others are waiting, too."
    world.ask("r0", "event", "wait", timeout=1, name="go")
    assert world.tick(1) == [("r0", "timeout", "event 'go' was not set within 1 s.")]
    assert world.state.due() == pytest.approx(109.5 + 2.0, abs=3)


def test_a_time_out_of_zero_does_not_wait(world: World) -> None:
    [(asker, code, _)] = world.ask("r0", "queue", "get", None, timeout=0)
    assert (asker, code) == ("r0", "timeout")
    assert world.state.waiting == 0


def test_a_lock_goes_from_one_to_the_next_with_growing_tokens(world: World) -> None:
    assert world.ask("r0", "lock", "acquire") == [("r0", "", 1)]
    assert world.ask("r1", "lock", "acquire") == []
    assert world.ask("r2", "lock", "acquire") == []
    assert world.ask("r0", "lock", "release", 1) == [("r0", "", None), ("r1", "", 2)]
    world.now += 5
    assert world.ask("client", "lock", "state") == [("client", "", ["rank 1", 5.0])]
    [(_, code, text)] = world.ask("r0", "lock", "release", 1)
    assert code == "lock lost"
    assert "rank 1 holds it now" in text


def test_a_lock_that_is_not_free_names_its_holder(world: World) -> None:
    world.ask("r1", "lock", "acquire")
    world.now += 10
    world.ask("r0", "lock", "acquire", timeout=2)
    [(_, _, text)] = world.tick(2)
    assert text == "lock 'x' was not free within 2 s: rank 1 has held it for 12 s."
    world.ask("r1", "lock", "acquire", timeout=1)
    [(_, _, text)] = world.tick(1)
    assert "a lock cannot be acquired twice" in text


def test_the_lock_of_a_process_that_is_gone_goes_to_the_next(world: World) -> None:
    world.ask("r0", "lock", "acquire")
    world.ask("r1", "lock", "acquire")
    world.ask("r2", "lock", "acquire")
    assert world.gone("r1") == []  # it waited, and waits no more
    assert world.gone("r0") == [("r2", "", 2)]


def test_a_barrier_opens_when_all_have_come_and_can_be_passed_again(world: World) -> None:
    for _ in range(2):
        assert world.ask("r2", "barrier", "wait", None, 0.0) == []
        assert world.ask("r0", "barrier", "wait", None, 0.0) == []
        assert world.ask("r1", "barrier", "wait", None, 0.0) == [("r2", "", 0), ("r0", "", 1), ("r1", "", 2)]
    assert world.state.waiting == 0


def test_a_barrier_names_who_is_missing_and_breaks_for_the_others(world: World) -> None:
    world.ask("r0", "barrier", "wait", None, 0.0, timeout=5)
    world.ask("r2", "barrier", "wait", None, 0.0)
    late, broken = world.tick(5)
    assert late == (
        "r0",
        "timeout",
        "barrier 'x': within 5 s 2 of 3 have arrived (rank 0 and rank 2); rank 1 did not arrive.",
    )
    assert broken[:2] == ("r2", "broken")
    assert broken[2] == ["barrier 'x' is broken: rank 0 has given up after 5 s. The next wait begins again.", 0]


def test_a_rank_that_is_lost_breaks_the_barrier_for_those_who_wait(world: World) -> None:
    world.ask("r0", "barrier", "wait", None, 0.0)
    world.ask("r1", "barrier", "wait", None, 0.0)
    [(asker, code, (text, rank))] = world.gone("r1")
    assert (asker, code, rank) == ("r0", "broken", 1)
    assert "rank 1 is lost: its process has ended" in text
    world.ask("r0", "barrier", "wait", None, 0.0)
    [(asker, code, (text, rank))] = world.gone("r2")  # which had not come
    assert (asker, code, rank) == ("r0", "broken", 2)


def test_a_rank_that_was_lost_while_the_call_ran_breaks_its_barrier_and_a_later_call_waits(world: World) -> None:
    world.gone("r1")
    world.now += 2
    [(asker, code, (_, rank))] = world.ask("r0", "barrier", "wait", None, 3.0)
    assert (asker, code, rank) == ("r0", "broken", 1)
    assert world.ask("r0", "barrier", "wait", None, 1.0) == []


def test_a_loss_that_the_client_tells_again_counts_once(world: World) -> None:
    world.gone("r1")
    world.ask("r0", "barrier", "wait", None, 0.0)
    world.now += 1
    assert world.state.lost(1, "rank 1 is lost", world.now) == []
    world.now += 10
    assert len(world.state.lost(1, "rank 1 is lost", world.now)) == 1


def test_a_barrier_of_some_is_not_broken_by_the_loss_of_others(world: World) -> None:
    world.ask("r0", "barrier", "wait", 2, 0.0)
    assert world.gone("r2") == []
    assert world.ask("client", "barrier", "wait", 2, 0.0) == [("r0", "", 0), ("client", "", 1)]
    world.ask("client", "barrier", "wait", 2, 0.0)
    [(asker, code, (_, rank))] = world.gone("r0")  # it has come before, so it is expected
    assert (asker, code, rank) == ("client", "broken", 0)


def test_settings_that_contradict_each_other_are_refused_in_words(world: World) -> None:
    world.ask("r0", "queue", "put", 2, values=(b"a",))
    assert "maxsize=2 already" in world.ask("r1", "queue", "put", 3, values=(b"a",))[0][2]
    world.ask("r0", "barrier", "wait", None, 0.0, name="b")
    assert "all ranks already" in world.ask("r1", "barrier", "wait", 2, 0.0, name="b")[0][2]
    [(_, code, text)] = world.ask("r1", "dict", "get", "'a'")
    assert (code, text) == ("argument", "'x' is a queue in this pool, not a dict; use another name for the dict.")
    assert world.ask("r1", "queue", "fly")[0][1] == "argument"
    assert world.ask("r1", "tree", "get", name="t")[0][1] == "argument"


def test_who_withdraws_waits_no_more_and_is_answered_once(world: World) -> None:
    world.ask("r0", "queue", "get", None)
    assert world.told(world.state.withdraw("r0", world.asked)) == [("r0", "withdrawn", "")]
    assert world.state.withdraw("r0", world.asked) == []
    assert world.ask("r1", "queue", "put", None, values=(b"a",)) == [("r1", "", None)]
    world.ask("r0", "barrier", "wait", None, 0.0, name="b")
    world.ask("r1", "barrier", "wait", None, 0.0, name="b")
    left, broken = world.told(world.state.withdraw("r1", world.asked))
    assert left[:2] == ("r1", "withdrawn")
    assert broken[:2] == ("r0", "broken")


def test_what_was_asked_of_an_earlier_server_is_told_to_be_lost(world: World) -> None:
    [(_, code, text)] = world.ask("r0", "dict", "get", "'a'", epoch="e0")
    assert code == "lost"
    assert "empty now" in text
    assert world.ask("r0", "dict", "get", "'a'", epoch="e1") == [("r0", "", 0)]


def test_closing_answers_everybody_who_waits(world: World) -> None:
    world.ask("r0", "queue", "get", None)
    world.ask("r1", "lock", "acquire", name="l")
    world.ask("r2", "lock", "acquire", name="l")
    ended = world.told(world.state.end("closed", "the pool is closing"))
    assert sorted(ended) == [("r0", "closed", "the pool is closing"), ("r2", "closed", "the pool is closing")]
    assert world.ask("r0", "queue", "len")[0][1] == "closed"
    assert world.state.waiting == 0


def test_a_full_server_refuses_and_takes_again_when_there_is_room(world: World) -> None:
    piece = bytes(ROOM // 4)
    for key in "abc":
        world.ask("r0", "dict", "set", key, values=(piece,))
    [(_, code, text)] = world.ask("r0", "queue", "put", None, values=(piece, b"more"), name="q")
    assert code == "too large"
    assert "768 of 1,024 MiB" in text
    world.ask("r0", "dict", "pop", "a")
    assert world.ask("r0", "queue", "put", None, values=(piece,), name="q") == [("r0", "", None)]


def test_every_kind_counts_the_bytes_that_it_keeps(world: World) -> None:
    for kind in KINDS:
        world.state._find("", kind, kind, [])
    world.ask("r0", "dict", "set", "'a'", values=(b"123",), name="dict")
    world.ask("r0", "dict", "set", "'a'", values=(b"1",), name="dict")
    world.ask("r0", "set", "add", values=(b"'a'\n'b'",), name="set")
    world.ask("r0", "queue", "put", None, values=(b"12345",), name="queue")
    assert world.state._size == 4 + 6 + 5
    world.ask("r0", "dict", "pop", "'a'", name="dict")
    world.ask("r0", "set", "clear", name="set")
    world.ask("r0", "queue", "get", None, name="queue")
    assert world.state._size == 0


def test_a_set_takes_no_more_than_there_is_room_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.node.shared.state.ROOM", 10)
    assert world.ask("r0", "set", "add", values=(b"12345678",)) == [("r0", "", 1)]
    assert world.ask("r0", "set", "add", values=(b"abcdefgh",))[0][1] == "too large"


def test_more_values_than_one_answer_takes_are_refused_in_words(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.node.shared.state._MOST_ITEMS", 2)
    world.ask("r0", "dict", "update", values=(b"1\n2\n3", b"a", b"b", b"c"))
    [(_, code, text)] = world.ask("r0", "dict", "items")
    assert code == "too large"
    assert "keys()" in text
    assert world.ask("r0", "dict", "keys") == [("r0", "", None, b"1\n2\n3")]
