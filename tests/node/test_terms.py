"""How long a keeper's processes may live, as agents tell it."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.node.client_link import ClientListener
from skyward.node.terms import Terms, TermsPage, TermsSlot, merged
from skyward.transport import local_sockets
from skyward.transport.frames import encode
from skyward.transport.link import greet


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


# who may speak to the agent of a run: another process, over the socket where it lets clients in


class Door:
    """An agent's listener on a socket of this computer, which is what tells a driver of an earlier start to go."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self.slot = str(tmp_path / "agent"), TermsSlot(bytearray(64), 0)
        self.listener = local_sockets.listen(self.path)
        woken = self.woken = threading.Event()
        self.door = ClientListener(self.listener, "", None, "pool.", self.slot, woken.set, lambda sock, name: None)
        self.door.open()

    def greet(self, greeting: dict[str, Any]) -> dict[str, Any] | None:
        """What it answers at once; None if it lets the greeting in."""
        with local_sockets.connect(self.path, 60) as sock:
            for piece in encode(greeting):
                sock.sendall(piece)
            while not self.woken.wait(0.01):
                if select.select([sock], [], [], 0)[0]:
                    return greet(sock, None, time.monotonic() + 60)
            self.woken.clear()
        return None


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path)
    made.slot.take(Terms(epoch=2, serial=1))
    made.door.since = "start 2 of the run's program, at 14:02:00"
    yield made
    made.listener.close()
    while (admitted := made.door.next()) is not None:
        admitted[0].close()


@pytest.mark.parametrize("epoch", [{}, {"epoch": 1}], ids=["no program of a run", "the first start"])
def test_a_program_of_an_earlier_start_is_refused_with_who_took_over(door: Door, epoch: dict[str, int]) -> None:
    """SEC-37."""
    answer = door.greet({"session": "pool.x", "received": 0, **epoch})
    assert answer is not None
    assert "start 2 of the run's program, at 14:02:00" in answer["refused"]


def test_the_program_that_was_started_last_is_let_in(door: Door) -> None:
    assert door.greet({"session": "pool.x", "received": 0, "epoch": 2}) is None


def test_a_word_of_an_earlier_epoch_is_refused_and_one_of_a_later_epoch_taken(door: Door) -> None:
    word = {"serial": 9, "left": 60.0, "drain": 1.0, "end": False, "by": "me"}
    assert "refused" in (door.greet({"terms": 1, **word}) or {})
    assert door.greet({"terms": 3, **word}) is None
