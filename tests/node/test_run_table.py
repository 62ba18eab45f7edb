"""What becomes of a detached run: every row of the table, and what it must never do."""

from __future__ import annotations

import random

import pytest

from skyward.node.run_table import Event, Run


def acts(run: Run, event: Event) -> tuple[str, list[str]]:
    after, actions = run.step(event)
    return after.state, [f"{action.act} {action.why}".strip() for action in actions]


def test_a_program_starts_only_when_whoever_submitted_it_has_let_go() -> None:
    assert acts(Run(), Event("go")) == ("running", ["write started", "start driver"])


@pytest.mark.parametrize("kind", ["late", "stop", "deadline"])
def test_a_run_that_never_began_ends_everything(kind: str) -> None:
    assert acts(Run(), Event(kind)) == ("over", [f"write {kind}", "end all"])  # type: ignore[arg-type]


def test_what_a_program_left_is_killed_before_its_end_is_written() -> None:
    assert acts(Run("running"), Event("exited", 0)) == (
        "holding",
        ["kill driver", "write ended: exited", "end others", "copy"],
    )


def test_a_failed_program_is_started_again_in_a_new_epoch_after_the_old_one_was_killed() -> None:
    run, actions = Run("running", restarts=1).step(Event("exited", 3))
    assert [action.act for action in actions] == ["write", "kill driver", "raise epoch", "start driver"]
    assert (run.state, run.restarts) == ("running", 0)
    assert acts(run, Event("exited", 3))[0] == "holding"


def test_a_program_that_succeeded_is_not_started_again() -> None:
    assert acts(Run("running", restarts=3), Event("exited", 0))[0] == "holding"


def test_a_program_that_is_being_stopped_is_not_started_again() -> None:
    run, _ = Run("running", restarts=3).step(Event("stop"))
    assert run.state == "stopping"
    assert acts(run, Event("exited", 143)) == ("holding", ["kill driver", "write ended: stop", "end others", "copy"])


def test_a_program_that_does_not_stop_is_killed() -> None:
    assert acts(Run("stopping", why="stop"), Event("grace")) == ("stopping", ["kill driver"])


@pytest.mark.parametrize("kind", ["hold", "stop", "deadline"])
def test_node_0_is_held_until_its_time_is_over(kind: str) -> None:
    assert acts(Run("holding"), Event(kind)) == ("over", ["end all"])  # type: ignore[arg-type]


def test_in_any_order_of_events_one_program_runs_at_a_time_and_everything_ends_once() -> None:
    kinds = ["go", "exited", "stop", "deadline", "late", "grace", "hold"]
    for seed in range(2000):
        chance = random.Random(seed)
        run, running, ended, epoch, written = Run(restarts=chance.randrange(3)), False, 0, 1, 0
        for _ in range(30):
            kind = chance.choice(kinds)
            if kind == "exited" and not running:
                continue  # nothing exits that does not run
            running = running and kind != "exited"
            run, actions = run.step(Event(kind, chance.choice((0, 0, 1))))  # type: ignore[arg-type]
            for action in actions:
                match action.act:
                    case "start driver":
                        assert not running
                        running = True
                    case "raise epoch":
                        assert not running
                        epoch += 1
                    case "end all":
                        ended += 1
                        assert not running
                    case "write":
                        written += action.why.startswith("ended")
                    case _:
                        pass
        assert ended <= 1
        assert written <= 1
