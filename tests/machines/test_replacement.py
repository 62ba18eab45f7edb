"""Another machine for a node: when it is asked for, tried again, given up, and asked for a second time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import pytest

from skyward.errors import NoCapacity, PoolClosed, SkywardError
from skyward.machines.replacement import Replacements
from tests.support.waiting import until


class Source:
    """Machines as a test has them: each `prepare` gives the next answer, an error or a machine."""

    def __init__(self, *answers: Exception | None, wanted: bool = True) -> None:
        self.answers, self.is_wanted, self.prepared = list(answers), wanted, 0
        self.gone: list[dict[int, str] | SkywardError] = []

    def wanted(self, node: int) -> bool:
        return self.is_wanted

    def prepare(self, node: int) -> Callable[[], None]:
        self.prepared += 1
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer
        return lambda: None

    def ended(self, nodes: Sequence[int]) -> dict[int, str]:
        answer = self.gone.pop(0) if self.gone else {}
        if isinstance(answer, SkywardError):
            raise answer
        return answer

    def close(self) -> None:
        pass


class Pool:
    """What is replaced, as a test has it; pauses take no time."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.vacant, self.is_open = threading.Event(), True
        self.vacant.set()
        self.on_connect: Callable[[], None] = lambda: None
        self.silent: list[int] = []

    def await_vacant(self, node: int) -> bool:
        self.vacant.wait(60)
        return self.is_open

    def connect(self, node: int) -> None:
        self.log.append(("connect", node))
        self.on_connect()

    def not_replaced(self, node: int, reason: str) -> None:
        self.log.append(("not replaced", node, reason))

    def missing(self) -> list[int]:
        return self.silent

    def ended(self, node: int, reason: str) -> None:
        self.log.append(("ended", node, reason))
        self.silent = [other for other in self.silent if other != node]

    def pause_for(self, seconds: float) -> bool:
        if seconds:
            self.log.append(("pause", seconds))
        return self.is_open

    def tell(self, node: int, text: str) -> None:
        self.log.append(("tell", node, text))

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [entry for entry in self.log if entry[0] == kind]


NO_ROOM = "there is no capacity (2 offers were tried; the last: b: full)"


def no_room() -> NoCapacity:
    return NoCapacity("2 x T4", ["a: full", "b: full"])


@contextmanager
def fulfilled(source: Source, pool: Pool) -> Generator[Replacements]:
    """Requests that are fulfilled; afterwards, no thread of them is left."""
    requests = Replacements(source)  # type: ignore[arg-type] - as far as it is needed
    requests.start(pool)  # type: ignore[arg-type]
    yield requests
    requests.close(60)


def replace_and_wait(requests: Replacements, node: int = 1) -> None:
    assert requests.begin(node)
    until(lambda: not requests.going(node))


def replaced(source: Source, pool: Pool) -> None:
    with fulfilled(source, pool) as requests:
        replace_and_wait(requests)


def test_another_machine_is_connected_to_once_the_old_one_has_nothing_to_do() -> None:
    source, pool = Source(), Pool()
    pool.vacant.clear()
    with fulfilled(source, pool) as requests:
        assert requests.begin(1)
        until(lambda: source.prepared)
        assert requests.going(1)
        assert requests.begin(1), "said twice, done once"
        assert pool.log == []
        pool.vacant.set()
        until(lambda: not requests.going(1))
    assert (source.prepared, pool.log) == (1, [("connect", 1)])


def test_a_machine_that_is_not_to_be_replaced_is_not() -> None:
    requests = Replacements(Source(wanted=False))  # type: ignore[arg-type]
    assert not requests.begin(1)
    assert not requests.going(1)


def test_missing_capacity_is_waited_for_and_told() -> None:
    source, pool = Source(no_room(), no_room()), Pool()
    replaced(source, pool)
    assert source.prepared == 3
    assert [entry[1] for entry in pool.of("pause")] == [5.0, 15.0]
    assert pool.of("tell")[0] == ("tell", 1, f"no replacement yet: {NO_ROOM}. Trying again in 5 s")
    assert pool.of("connect") == [("connect", 1)]
    assert pool.of("not replaced") == []


def test_a_node_is_given_up_when_there_was_no_capacity_for_minutes() -> None:
    source, pool = Source(*(no_room() for _ in range(20))), Pool()
    replaced(source, pool)
    assert sum(float(str(entry[1])) for entry in pool.of("pause")) > 120, "for as long as the old machine may count"
    assert pool.of("not replaced") == [("not replaced", 1, NO_ROOM)]


def test_an_error_that_does_not_pass_is_final_and_told_in_one_line() -> None:
    source, pool = Source(SkywardError("not allowed.\nAsk for the right.")), Pool()
    replaced(source, pool)
    assert source.prepared == 1
    assert pool.log == [("not replaced", 1, "not allowed")]


def test_after_a_failure_the_node_may_be_replaced_again() -> None:
    source, pool = Source(SkywardError("not allowed.")), Pool()
    with fulfilled(source, pool) as requests:
        replace_and_wait(requests)
        replace_and_wait(requests)
    assert pool.of("connect") == [("connect", 1)]


def test_a_machine_that_is_taken_away_while_we_connect_to_it_is_replaced_as_well() -> None:
    source, pool = Source(), Pool()
    with fulfilled(source, pool) as requests:

        def lose_it_once() -> None:
            pool.on_connect = lambda: None
            assert requests.begin(1)

        pool.on_connect = lose_it_once
        replace_and_wait(requests)
    assert (source.prepared, pool.log) == (2, [("connect", 1)] * 2)


@pytest.mark.parametrize("moment", ["prepared", "paused"])
def test_nothing_is_told_of_a_pool_that_closes_meanwhile(moment: str) -> None:
    source, pool = Source(*([no_room()] if moment == "paused" else [])), Pool()
    pool.is_open = False
    replaced(source, pool)
    assert pool.of("connect") == pool.of("not replaced") == []


def test_a_supply_that_is_closed_ends_it_without_a_word() -> None:
    pool = Pool()
    replaced(Source(PoolClosed("the pool was closed.")), pool)
    assert pool.log == []


def test_the_provider_is_asked_about_silent_nodes_until_all_are_known() -> None:
    source, pool = Source(), Pool()
    source.gone = [{}, SkywardError("our own network is down"), {2: "taken back"}]
    pool.silent = [2]
    with fulfilled(source, pool) as requests:
        requests.inquire()
        requests.inquire()
        until(lambda: pool.of("ended") == [("ended", 2, "taken back")])
    assert [entry[1] for entry in pool.of("pause")][:3] == [1.0, 5.0, 5.0]
