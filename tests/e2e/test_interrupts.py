"""Ctrl-C at the worst moment: between taking a lock and using it. The pool goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

import skyward as sky

PROGRAM = """
import signal, sys
import skyward as sky

@sky.compute
def double(x):
    return 2 * x

def interrupt_when(inner, outer):
    # a profile function only places the signal: as a lock is taken or let go in the frame `outer`
    def look(frame, event, arg):
        if event == "return" and frame.f_code.co_name == inner and frame.f_back.f_code.co_name == outer:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)
    sys.setprofile(look)

with sky.ComputePool(nodes=2, console=False) as pool:
    double(1) @ pool
    for inner, outer, call in (
        ("__enter__", "send_to", lambda: double(1) @ pool),
        ("__exit__", "send_to", lambda: double(1) @ pool),
        ("__enter__", "exception", lambda: double(1) >> pool),
        ("__enter__", "wait", lambda: double(1) @ pool),
        ("__enter__", "done", lambda: (double(1) > pool).done()),
    ):
        interrupt_when(inner, outer)
        try:
            call()
        except KeyboardInterrupt:
            print("interrupted in", outer)
        sys.setprofile(None)
        assert (double(4) > pool).result(60) == 8, outer
        assert double(5) @ pool == [10, 10], outer
print("done")
"""


def test_a_pool_goes_on_after_an_interrupt_at_a_bad_moment(script: Callable[..., subprocess.Popen[str]]) -> None:
    process = script(PROGRAM)
    out, err = process.communicate(timeout=300)
    assert out.splitlines()[-1:] == ["done"], out + err
    assert process.returncode == 0, err


@sky.compute
def stop() -> int:
    raise StopIteration


@pytest.mark.parametrize("ordered", [True, False])
def test_a_call_that_raises_stop_iteration_does_not_end_a_stream_as_if_all_were_well(
    pool: sky.ComputePool, ordered: bool
) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        list(sky.gather(stop(), stop(), stream=True, ordered=ordered) >> pool)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_one_failure_among_very_many_calls_holds_nobody_up(pool: sky.ComputePool) -> None:
    """Cancelling the rest is not done by the thread that reads the links, and costs the same for each of them."""

    @sky.compute
    def maybe(i: int) -> int:
        if i == 0:
            raise ValueError(i)
        return i

    down: list[object] = []
    unsubscribe = pool.on_event(lambda event: down.append(event) if isinstance(event, sky.events.NodeDown) else None)
    with pytest.raises(ValueError):
        sky.gather(*[maybe(i) for i in range(20_000)]) >> pool
    assert maybe(7) >> pool == 7
    unsubscribe()
    assert down == []
