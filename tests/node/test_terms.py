"""How long a keeper's processes may live, as agents tell it."""

from __future__ import annotations

import math

import pytest

from skyward.node.terms import Terms, TermsPage, TermsSlot, merged


def test_hearing_of_somebody_never_makes_it_longer_ago() -> None:
    assert Terms().hear(5.0).hear(3.0).heard == 5.0


def test_the_last_word_of_an_epoch_counts_whether_it_shortens_or_lengthens() -> None:
    terms = Terms().take(Terms(deadline=100.0, epoch=1, serial=1)).take(Terms(deadline=50.0, epoch=1, serial=2))
    assert terms.deadline == 50.0
    assert terms.take(Terms(deadline=200.0, epoch=1, serial=1)).deadline == 50.0, "an older word came late"
    assert terms.take(Terms(deadline=200.0, epoch=1, serial=3)).deadline == 200.0


def test_a_later_epoch_counts_more_than_any_serial() -> None:
    terms = Terms(deadline=50.0, epoch=1, serial=9)
    assert terms.take(Terms(deadline=70.0, epoch=2, serial=1)).deadline == 70.0
    assert Terms(epoch=2).is_stale(1)
    assert not Terms(epoch=2).is_stale(2)


def test_what_is_ending_goes_on_ending() -> None:
    assert Terms(ending=True, epoch=1).take(Terms(epoch=2)).ending


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (Terms(heard=95.0), ""),
        (Terms(heard=80.0), "lease"),
        (Terms(heard=95.0, deadline=100.0), "deadline"),
        (Terms(heard=95.0, ending=True), "end"),
    ],
)
def test_why_everything_ends(terms: Terms, why: str) -> None:
    assert terms.over(100.0, lease=10.0) == why


def test_without_a_lease_nobody_needs_to_be_heard() -> None:
    assert Terms(heard=0.0).over(1e9, lease=0.0) == ""


def test_a_keeper_reads_what_all_its_agents_were_told() -> None:
    page = TermsPage(3)
    page.slot(0).hear(7.0)
    page.slot(2).take(Terms(deadline=90.0, epoch=1, serial=1))
    assert page.read() == Terms(heard=7.0, deadline=90.0, epoch=1, serial=1)


def test_an_agent_that_is_started_again_knows_the_epoch() -> None:
    memory = bytearray(64)
    TermsSlot(memory, 0).take(Terms(epoch=4, serial=2))
    assert TermsSlot(memory, 0).terms.epoch == 4


def test_a_slot_that_is_half_written_is_not_read() -> None:
    page = TermsPage(1)
    page.slot(0).take(Terms(deadline=90.0, epoch=1, serial=1))
    before = page.read()
    page._memory[8:12] = b"\xff\xff\xff\xff"  # an agent is killed while it writes a new deadline
    assert page.read() == before


def test_the_order_in_which_slots_are_read_does_not_matter() -> None:
    some = [Terms(heard=3.0, deadline=math.inf), Terms(deadline=5.0, epoch=1, serial=2), Terms(ending=True)]
    assert merged(some) == merged(reversed(some))
