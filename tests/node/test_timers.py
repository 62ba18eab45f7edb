"""Things to do later: in the order in which they are due, once, and not when they were cancelled."""

from __future__ import annotations

from skyward.node.timers import Timers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_acts_are_done_when_they_are_due_and_in_that_order() -> None:
    clock, done = Clock(), list[str]()
    timers = Timers(clock)
    timers.after(2, lambda: done.append("second"))
    timers.after(1, lambda: done.append("first"))
    timers.after(1, lambda: done.append("as soon, but asked for later"))
    assert timers.due() == 1
    timers.run()
    assert done == []
    clock.now = 2
    timers.run()
    timers.run()
    assert done == ["first", "as soon, but asked for later", "second"]
    assert timers.due() == float("inf")


def test_an_act_that_was_cancelled_is_not_done() -> None:
    clock, done = Clock(), list[int]()
    timers = Timers(clock)
    numbers = [timers.after(1, lambda i=i: done.append(i)) for i in range(200)]
    for number in numbers[:-1]:
        timers.cancel(number)
    timers.cancel(numbers[0])
    assert len(timers._heap) < 100, "what is cancelled is not kept"
    clock.now = 1
    timers.run()
    assert done == [199]


def test_an_act_may_ask_for_another() -> None:
    clock, done = Clock(), list[float]()
    timers = Timers(clock)

    def again() -> None:
        done.append(clock.now)
        timers.after(1, again)

    timers.after(1, again)
    for clock.now in (1, 2, 3):
        timers.run()
    assert done == [1, 2, 3]
