"""When a node counts as lost."""

from __future__ import annotations

from skyward.client.connections import given_up, next_try


def test_a_node_of_this_computer_is_given_up_after_a_quarter_of_a_minute() -> None:
    assert not given_up(None, away=14, silent=14, refused=True, others_speak=True)
    assert given_up(None, away=16, silent=16, refused=False, others_speak=False)


def test_a_machine_where_nobody_listens_any_more_is_lost_in_seconds() -> None:
    """Row 14: told from a lost link by the refusal."""
    assert not given_up(900, away=1, silent=1, refused=True, others_speak=False)
    assert given_up(900, away=2.5, silent=2.5, refused=True, others_speak=False)


def test_a_silent_machine_is_lost_when_the_others_speak() -> None:
    """Row 13: within 20 s."""
    assert not given_up(900, away=5, silent=14, refused=False, others_speak=True)
    assert given_up(900, away=6, silent=16, refused=False, others_speak=True)


def test_a_client_that_was_stopped_lets_every_machine_come_back() -> None:
    """Row 30: the first that answers must not have the others given up."""
    assert not given_up(900, away=1, silent=40, refused=False, others_speak=True)
    assert given_up(900, away=6, silent=45, refused=False, others_speak=True)


def test_after_a_time_without_any_machine_the_first_that_is_back_does_not_have_the_others_given_up() -> None:
    """Rows 28 to 30: an attempt that began while this computer was offline may still fail."""
    assert not given_up(900, away=60, silent=70, refused=False, others_speak=True, rejoined=12)
    assert given_up(900, away=80, silent=90, refused=False, others_speak=True, rejoined=30)


def test_when_no_machine_answers_the_fault_is_ours_until_the_lease_ends() -> None:
    """Rows 28 to 30: a laptop that slept finds its nodes at work."""
    assert not given_up(900, away=880, silent=890, refused=False, others_speak=False)
    assert given_up(900, away=890, silent=901, refused=False, others_speak=False)


def test_attempts_come_often_at_first_and_rarely_for_a_lost_node() -> None:
    assert next_try(0, gone=False) < 0.1
    assert next_try(60, gone=False) == 2.0
    assert next_try(60, gone=True) == 5.0
