"""What was spent, by pool and day: the computation as tables, and what it is read from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from skyward import events
from skyward.cli.cost import By, Row, by_day, gather, of_events, rows, total
from skyward.history.recorder import Recorder
from skyward.machines import spent
from skyward.machines.ledger import Ledger
from skyward.machines.spent import Charge

HOUR = 3600.0


def at(text: str, zone: tzinfo = UTC) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def charge(began: str, ended: str, dollars: float, zone: tzinfo = UTC, **more: object) -> Charge:
    return Charge("p", "AWS", at(began, zone), at(ended, zone), dollars, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("began", "ended", "dollars", "zone", "days"),
    [
        ("2026-11-16T10:00", "2026-11-16T12:00", 4.0, UTC, [("2026-11-16", 4.0)]),
        # over midnight: one hour before, three after
        ("2026-11-15T23:00", "2026-11-16T03:00", 4.0, UTC, [("2026-11-15", 1.0), ("2026-11-16", 3.0)]),
        # three days, the one in the middle whole
        (
            "2026-11-14T12:00", "2026-11-16T12:00", 8.0, UTC,
            [("2026-11-14", 2.0), ("2026-11-15", 4.0), ("2026-11-16", 2.0)],
        ),
        # until midnight exactly: nothing is left for the day after
        ("2026-11-15T22:00", "2026-11-16T00:00", 2.0, UTC, [("2026-11-15", 2.0)]),
        # a machine that ended at once was billed for a minute all the same
        ("2026-11-16T10:00", "2026-11-16T10:00", 0.1, UTC, [("2026-11-16", 0.1)]),
        # the day on which clocks go back has 25 hours
        (
            "2026-10-25T00:00", "2026-10-26T01:00", 26.0, ZoneInfo("Europe/Berlin"),
            [("2026-10-25", 25.0), ("2026-10-26", 1.0)],
        ),
    ],
)  # fmt: skip
def test_a_machine_that_runs_over_midnight_is_split_by_day(
    began: str, ended: str, dollars: float, zone: tzinfo, days: Sequence[tuple[str, float]]
) -> None:
    parts = [(day.isoformat(), part.dollars) for day, part in by_day(charge(began, ended, dollars, zone), zone)]
    assert [day for day, _ in parts] == [day for day, _ in days]
    assert [cost for _, cost in parts] == pytest.approx([cost for _, cost in days])


CHARGES = [
    Charge("a", "AWS", at("2026-11-15T23:00"), at("2026-11-16T01:00"), 2.0, "i-1", "spot"),
    Charge("a", "AWS", at("2026-11-16T00:00"), at("2026-11-16T01:00"), 3.0, "i-2", "on-demand", running=True),
    Charge("b", "AWS", at("2026-11-16T00:00"), at("2026-11-16T01:00"), 0.5, "i-3", "on-demand", unknown=True),
    Charge("c", "Lab", at("2026-11-14T00:00"), at("2026-11-14T01:00"), 1.0),
]


@pytest.mark.parametrize(
    ("by", "since", "found"),
    [
        (
            "pool and day", date(2026, 11, 1),
            [
                Row("2026-11-16", "a", "AWS", 4.0, 1.0, 3.0, 2, 0, True),
                Row("2026-11-16", "b", "AWS", 0.5, 0.0, 0.5, 1, 1),
                Row("2026-11-15", "a", "AWS", 1.0, 1.0, 0.0, 1),
                Row("2026-11-14", "c", "Lab", 1.0),
            ],
        ),
        (
            "pool", date(2026, 11, 15),
            [Row(None, "a", "AWS", 5.0, 2.0, 3.0, 2, 0, True), Row(None, "b", "AWS", 0.5, 0.0, 0.5, 1, 1)],
        ),
        ("day", date(2026, 11, 16), [Row("2026-11-16", None, None, 4.5, 1.0, 3.5, 3, 1, True)]),
        (
            "provider", date(2026, 11, 1),
            [Row(None, None, "AWS", 5.5, 2.0, 3.5, 3, 1, True), Row(None, None, "Lab", 1.0)],
        ),
    ],
)  # fmt: skip
def test_costs_add_up_by_pool_day_and_provider(by: By, since: date, found: list[Row]) -> None:
    assert rows(CHARGES, by, since, UTC) == found


def test_the_total_counts_each_machine_once() -> None:
    assert total(CHARGES, date(2026, 11, 1), UTC) == Row(None, None, None, 6.5, 2.0, 3.5, 3, 1, True)


def test_a_history_says_what_was_spent_each_time_that_the_price_changed() -> None:
    t = at("2026-11-16T10:00")
    found = [
        events.PoolOpening("p", 2, "Lab", time=t),
        events.PoolCost("p", 2.0, time=t),
        events.PoolCost("p", 4.0, time=t + HOUR),
        events.PoolClosed("p", 1.0, 1, time=t + 2 * HOUR),
    ]
    charges = list(of_events("p", found, t + 2 * HOUR, running=False))
    assert [(c.provider, c.dollars, c.running) for c in charges] == [("Lab", 2.0, False), ("Lab", 4.0, False)]
    (open,) = of_events("p", found[:2], t + HOUR / 2, running=True)
    assert (open.dollars, open.running) == (1.0, True)
    (unknown,) = of_events("p", [events.PoolCost("p", math.inf, time=t)], t + HOUR, running=False)
    assert (unknown.dollars, unknown.unknown) == (0.0, True)


def test_what_was_kept_is_read_back_once_and_damage_is_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "state"
    first, second = CHARGES[0], CHARGES[2]
    spent.keep([first, second], root)
    spent.keep([first], root)  # given back a second time, by another process
    (path,) = (root / "spent").glob("*.jsonl")
    assert path.stat().st_mode & 0o077 == 0
    lines = '{"pool": 3}', "x", '{"pool":"\\u001b[2J","provider":"","began":1,"ended":2,"dollars":1e400}', "[" * 100_000
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert spent.kept(root) == [first, second]


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "spent").write_text("a file")
    spent.keep(CHARGES, tmp_path / "state")


def test_old_months_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "spent"
    spent.keep(CHARGES, tmp_path / "state")
    (folder / "2001-01.jsonl").write_text("")
    spent.keep(CHARGES, tmp_path / "state")
    assert [path.name for path in folder.iterdir()] == ["2026-11.jsonl"]


def test_a_pool_that_runs_counts_so_far_by_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    ledger = Ledger.start("p", {"provider": "AWS", "region": "us-east-1", "expires": 4e9})
    parts = {"machine": 1.0, "disk": 0.5, "address": 0.0}
    for id, price, more in (
        ("i-1", 1.5, parts),
        ("i-2", math.inf, {**parts, "machine": math.inf}),
        ("i-3", 1.5, parts),
    ):
        call = ledger.intent("instance", price=price)
        ledger.answer(call, "instance", id, price=price, parts=more, market="spot")
    made = ledger.history.made("instance")
    assert set(made) == {"i-1", "i-2", "i-3"}, "a price that is not known damages no line"
    ledger.note(ended="i-3", at=made["i-3"].time + HOUR)
    found = gather(0.0, made["i-1"].time + 2 * HOUR).charges
    ledger.remove()
    assert [(c.machine, c.unknown, c.running) for c in found] == [
        ("i-1", False, True), ("i-2", True, True), ("i-3", False, False),
    ]  # fmt: skip
    assert [c.dollars for c in found] == pytest.approx([3.0, 1.0, 1.5], abs=0.01)


def test_machines_that_nobody_gave_back_cost_until_they_end_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    now = datetime.now(UTC).timestamp()
    ledger = Ledger.start("p", {"provider": "AWS", "expires": now + HOUR})
    ledger.answer(ledger.intent("instance"), "instance", "i-1", price=2.0)
    (found,) = gather(0.0, now + 10 * HOUR).charges
    ledger.remove()
    assert found.dollars == pytest.approx(2.0, abs=0.01)


def test_a_pool_is_not_counted_by_its_history_and_its_receipt(tmp_path: Path) -> None:
    root = tmp_path / "state"
    for pool, provider, hourly in (
        ("p", "AWS", 2.0),
        ("lab", "Lab", 2.0),
        ("here", "Local", 0.0),
        ("there", "SSH", 0.0),
    ):
        recorder = Recorder(pool, root)
        now = datetime.now(UTC).timestamp()
        recorder.record(events.PoolOpening(pool, 1, provider))
        if hourly:
            recorder.record(events.PoolCost(pool, hourly, time=now))
        recorder.record(events.PoolClosed(pool, 1.0, 1, time=now + 1))
        recorder.close()
    now = datetime.now(UTC).timestamp()
    spent.keep([Charge("p", "AWS", now - 1, now, 7.0, "i-1")], root)
    found = gather(now - 60, now + 2, root)
    assert [(c.pool, c.dollars) for c in found.charges] == [("p", 7.0), ("lab", pytest.approx(2.0 / HOUR))]
    assert found.unpriced == (("Local", 1), ("SSH", 1))
