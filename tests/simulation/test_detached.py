"""Detached runs hold in every seed, and each mistake on the list is found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from skyward.node import keeper, steward
from skyward.node.terms import Terms, TermsSlot
from skyward.pool import detached, run_call
from tests.simulation.detached import simulate

SEEDS = 200
MANY = int(os.environ.get("SKYWARD_SIM_SEEDS", SEEDS))


def test_runs_end_once_never_too_early_and_never_too_late() -> None:
    assert simulate(range(MANY)) == {}


@contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, value)
        yield


def _told_before_disk(self: Any) -> None:
    self._epoch += 1
    self._leases.epoch = self._epoch
    self._renew()
    self._journal.append({"fact": "epoch", "time": 0.0, "epoch": self._epoch})


def _forgets(self: Any, memory: Any, index: int, changed: Any) -> None:
    self._memory, self._index, self._changed, self.terms = memory, index, changed, Terms()
    self._write(Terms(heard=1.0))


def _left_by_bye(self: Any, node: Any, code: int) -> None:
    node.left = node.left or code == 0


def _older_counts(self: Terms, other: Terms) -> Terms:
    return Terms(
        max(self.heard, other.heard),
        other.deadline if other.epoch >= self.epoch and other.serial else self.deadline,
        self.ending or other.ending,
        max(self.epoch, other.epoch),
        max(self.serial, other.serial),
    )


def _go_before_release(keeper: Any, order: Any, note: Any, release: Any) -> None:
    keeper.hold(order, 0.0)
    note()
    keeper.go(0.0)
    release()


def _told_before_rename(name: str, content: bytes) -> None:
    with open(run_call.os.open(run_call._file(name), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        run_call.os.fsync(file.fileno())


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "hearing is written without its maximum": (
        Terms,
        "hear",
        lambda self, when: Terms(when, self.deadline, self.ending, self.epoch, self.serial),
    ),
    "the epoch is told before it is on disk": (steward.Steward, "_raise_epoch", _told_before_disk),
    "an agent forgets the epoch when it restarts": (TermsSlot, "__init__", _forgets),
    "an older word counts": (Terms, "take", _older_counts),
    "the end of a pool counts as the end of the run": (keeper._Keeper, "_agent_died", _left_by_bye),
    "machines are not released when their process ends": (
        steward._Adoption,
        "ask",
        lambda self, pid, wanted, epoch: (
            {"refused": "taken"} if self._pid and self._pid != pid else setattr(self, "_pid", pid) or {"epoch": epoch}
        ),
    ),
    "an epoch of an earlier start is let in": (Terms, "is_stale", lambda self, epoch: False),
    "the program is started before its machines are released": (detached, "hand_over", _go_before_release),
    "a result has its name before it is whole": (run_call, "_write", _told_before_rename),
    "the end is not told": (
        steward.Leases,
        "tell",
        lambda self, left, drain, end=False, nodes=None: {},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    holder, attribute, mistake = MISTAKES[name]
    with patched(holder, attribute, mistake):
        assert simulate(range(SEEDS))
