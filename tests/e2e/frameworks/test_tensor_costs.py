"""What a call with a small tensor costs here and on its node, in counts of functions, beside one with a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from tests.e2e.test_call_costs import CALLS, Functions, begin_counting, end_counting, functions, same

__all__ = ["functions"]  # a fixture

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

MORE_HERE = 30  # functions of Skyward for each call; 10 to 12 when this was written
MORE_THERE = 20  # functions there but jax's own; 11 to 14


@pytest.fixture(scope="module")
def pool(functions: Functions) -> Iterator[sky.ComputePool]:
    jax.numpy.zeros(1).block_until_ready()  # it is ready before the functions are counted
    with sky.ComputePool(nodes=1, console=False) as opened:
        yield opened


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_a_small_tensor_runs_hardly_more_functions_than_a_number(
    functions: Functions, pool: sky.ComputePool, kind: str
) -> None:
    def costs(value: Any) -> tuple[float, float]:
        def calls() -> None:
            for _ in range(CALLS):
                same(value) >> pool

        calls()
        here = functions.during(calls)
        assert begin_counting() >> pool is None
        calls()
        there = end_counting() >> pool
        assert not functions.begun["skyward.transport.payload._cloudpickle"]
        return here, sum(count for name, count in there.items() if not name.startswith("jax.")) / CALLS

    here, there = costs(1)
    here_too, there_too = costs(torch.zeros(128) if kind == "torch" else jax.numpy.zeros(128))
    assert here_too < here + MORE_HERE, functions.begun.most_common(200)
    assert there_too < there + MORE_THERE
