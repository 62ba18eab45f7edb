"""Machines that have joined: how long one that is away is waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from skyward.errors import HostUnreachable
from skyward.setup.joined.arrivals import JoinShell
from skyward.setup.joined.members import MachineLeft, Member


def lost(seconds: float) -> Member:
    member = Member(0, "machine 0", "127.0.0.1", lambda member, message: None)
    member.set_connected(False)
    member.lost_at -= seconds
    return member


def order(id: str) -> Any:
    return ["run", id]


def test_a_machine_that_was_lost_long_ago_is_not_waited_for_as_long_as_one_lost_just_now() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="machine 0 has not come back for 6"):
        lost(60).stream(order, False, timeout=45)
    assert time.monotonic() - began < 30


def test_a_wait_is_never_longer_than_the_caller_wants() -> None:
    with pytest.raises(TimeoutError):
        lost(0).stream(order, False, timeout=0.05)


def test_a_machine_that_has_left_is_not_waited_for() -> None:
    member = lost(0)
    member.leave("it said so")
    with pytest.raises(ConnectionRefusedError, match="has left: it said so"):
        member.stream(order, False, timeout=600)


def test_a_machine_that_has_left_is_told_from_one_that_only_does_not_answer() -> None:
    member = lost(60)
    shell = JoinShell(member, lambda: ([], [], None))
    with pytest.raises(HostUnreachable, match="has not come back") as silent:
        shell.run(["true"])
    assert not isinstance(silent.value, MachineLeft)
    member.leave("its machine was taken away")
    with pytest.raises(MachineLeft, match="its machine was taken away"):
        shell.run(["true"])
