"""What is done when no lock is held."""

from __future__ import annotations

from skyward.client.futures import Deferred


def test_what_was_added_is_done_in_order_even_if_something_fails() -> None:
    deferred, seen = Deferred(), list[int]()

    def fail() -> None:
        raise ValueError("a bug")

    deferred.add(seen.append, 1)
    deferred.add(fail)
    deferred.add(seen.append, 2)
    assert seen == []
    deferred.run()
    assert seen == [1, 2]


def test_what_is_added_after_the_end_is_done_at_once() -> None:
    deferred, seen = Deferred(), list[int]()
    deferred.add(seen.append, 1)
    deferred.end()
    deferred.add(seen.append, 2)
    assert seen == [1, 2]
