"""When a provider is asked to let this computer in again, and what the user is told of it."""

from __future__ import annotations

from skyward.api.provider import Admission
from skyward.errors import SkywardError
from skyward.machines.replacement import Readmission

SAME = Admission(allowed="sg-1 lets in ssh from 198.51.100.1/32 only")


def asked(readmission: Readmission, until: float, start: float = 0.0, every: float = 5.0) -> list[float]:
    """When the provider is asked, if machines are asked after every few seconds and never answer."""
    times: list[float] = []
    now = start
    while now <= until:
        if readmission.due(now):
            times.append(now)
            readmission.answered(SAME, now)
        now += every
    return times


def test_a_connection_that_is_back_at_once_asks_nobody() -> None:
    assert not Readmission().due(0.0)


def test_machines_that_stay_silent_have_the_provider_asked_often_at_first_and_then_rarely() -> None:
    times = asked(Readmission(), 300.0)
    assert times[0] == 5.0
    assert times[1] - times[0] == 10.0
    assert times[-1] - times[-2] == 30.0


def test_a_second_silence_begins_as_the_first_did() -> None:
    readmission = Readmission()
    asked(readmission, 300.0)
    assert asked(readmission, 1060.0, start=1000.0)[0] == 1005.0


def test_a_new_address_is_told_at_once() -> None:
    readmission = Readmission()
    readmission.due(0.0)
    changed = Admission("sg-1 lets in 203.0.113.9/32 now", "sg-1 lets in ssh from 203.0.113.9/32 only")
    assert readmission.answered(changed, 5.0) == changed.changed


def test_who_is_let_in_is_told_once_when_nothing_has_changed_and_machines_stay_silent() -> None:
    readmission = Readmission()
    readmission.due(0.0)
    assert readmission.answered(SAME, 5.0) == ""
    assert SAME.allowed in readmission.answered(SAME, 45.0)
    assert readmission.answered(SAME, 75.0) == ""


def test_a_refusal_is_told_once_and_a_broken_network_not_at_all() -> None:
    readmission = Readmission()
    readmission.due(0.0)
    assert readmission.failed(SkywardError("not allowed"), 5.0) == ""  # it may pass
    assert "not allowed" in readmission.failed(SkywardError("not allowed"), 45.0)
    assert readmission.failed(SkywardError("not allowed"), 75.0) == ""


def test_a_provider_that_lets_in_everybody_has_nothing_told() -> None:
    readmission = Readmission()
    readmission.due(0.0)
    assert readmission.answered(Admission(), 45.0) == ""
