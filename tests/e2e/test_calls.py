"""Calls on a real pool: what each operator returns."""

from __future__ import annotations

import os

import pytest

import skyward as sky


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def where() -> tuple[int, int]:
    info = sky.instance_info()
    assert info is not None
    return info.node, os.getpid()


def test_one_node_runs_a_call(pool: sky.ComputePool) -> None:
    assert double(21) >> pool == 42


def test_a_broadcast_gives_one_result_a_node_in_node_order(pool: sky.ComputePool) -> None:
    """S1-01, S1-08."""
    results = where() @ pool
    assert [node for node, _ in results] == [0, 1]
    assert len({pid for _, pid in results} | {os.getpid()}) == 3


def test_a_group_gives_a_tuple(pool: sky.ComputePool) -> None:
    assert (double(1) & double(2) & double(3)) >> pool == (2, 4, 6)


def test_the_module_stands_for_the_innermost_pool() -> None:
    with sky.ComputePool(console=False):
        assert double(4) >> sky == 8


def test_a_closed_pool_refuses_calls() -> None:
    with sky.ComputePool(console=False) as closed:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        double(1) >> closed
