"""What is said to a pool is checked before anything is started."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.errors import InvalidArgument
from skyward.node.gpus import count_accelerators


@pytest.fixture(autouse=True)
def nothing_starts() -> Iterator[None]:
    """No test here may leave a process or a thread behind."""
    threads, children = threading.active_count(), len(psutil.Process().children())
    yield
    assert threading.active_count() == threads
    assert len(psutil.Process().children()) == children


SPEC = sky.Spec(nodes=2)

WRONG: list[tuple[str, dict[str, Any], str]] = [
    *[("nodes", {"nodes": v}, "nodes") for v in (0, -1, 1.5, "2", True, (0, 2), (3, 1), (1, 2, 3), [1, 2])],
    ("elastic nodes", {"nodes": (1, 2)}, "grow and shrink"),
    *[("concurrency", {"concurrency": v}, "concurrency") for v in (0, -1, 1.5, "4", True)],
    *[("processes", {"processes_per_node": v}, "processes_per_node=.*gpu") for v in (0, -1, 1.5, True, "GPU", "2")],
    *[("min_nodes", {"min_nodes": v, "nodes": 2}, "min_nodes") for v in (0, -1, 3, 1.5, "2", True)],
    ("min_nodes beside a Spec", {"min_nodes": 2}, "min_nodes=2 is more than nodes=1"),
    ("worker", {"worker": 4}, "worker.*Worker"),
    ("worker class", {"worker": sky.Worker}, "worker"),
    ("concurrency and worker", {"concurrency": 2, "worker": sky.Worker(2)}, "not both"),
    ("provider", {"provider": "aws"}, "provider"),
    ("provider class", {"provider": sky.Local}, "add parentheses"),
    ("accelerator", {"accelerator": "A1000"}, "A100"),
    ("accelerator kind", {"accelerator": 3}, "accelerator"),
    ("image", {"image": "python:3.11"}, "image.*Image"),
    ("image class", {"image": sky.Image}, "image"),
    ("plugins", {"plugins": "torch"}, "list"),
    ("one plugin", {"plugins": sky.plugins.torch()}, "list"),
    ("plugin not called", {"plugins": [sky.plugins.torch]}, r"add parentheses, plugins=\[sky.plugins.torch\(\)"),
    ("plugin of the user not called", {"plugins": [len]}, r"add parentheses, plugins=\[len\(\)"),
    ("decorator", {"plugins": [sky.integrations.torch]}, r"for functions.*plugins=\[sky.plugins.torch\(\)\]"),
    ("Trainer's", {"plugins": [sky.integrations.transformers]}, r"plugins=\[sky.plugins.huggingface\(token=...\)\]"),
    ("decorator called", {"plugins": [sky.integrations.jax()]}, "for functions, not for pools"),
    ("plugin twice", {"plugins": [sky.plugins.torch(cuda="cu124"), sky.plugins.torch()]}, "'torch' 2 times"),
    ("plugin kind", {"plugins": [3]}, "Plugin"),
    ("plugins none", {"plugins": None}, "list"),
    *[("name", {"name": v}, "name") for v in ("", "a b", "a/b", "x" * 64, 3, "a\n", "-a", ".a", "_a", "é", "名")],
    *[("vcpus", {"vcpus": v}, "vcpus") for v in (0, -1, "4", True, math.inf, math.nan)],
    *[("memory", {"memory_gb": v}, "memory_gb") for v in (0, "16", math.nan)],
    ("architecture", {"architecture": "x86"}, "x86_64"),
    ("allocation", {"allocation": "cheap"}, "cheapest"),
    *[("selection", {"selection": v}, "cheapest, first") for v in ("best", None, 1)],
    *[("cost", {"max_hourly_cost": v}, "max_hourly_cost") for v in (0, -2, "1")],
    *[("ttl", {"ttl": v}, "ttl") for v in (0, "600", None)],
    *[("retries", {"retries": v}, "retries") for v in (-1, 1.5, "3", None, True)],
    *[("replace", {"replace": v}, "replace") for v in (1, "yes", True)],
    *[("timeout", {"default_compute_timeout": v}, "default_compute_timeout") for v in (0, -1, "60", True)],
    *[("patience", {"provision_timeout": v}, "provision_timeout") for v in (0, -1, None, "60")],
    *[("result size", {"max_result_bytes": v}, "max_result_bytes") for v in (0, -1, 1.5, "2G", None)],
    *[("grace", {"grace": v}, "grace") for v in (0, -1, None, "10")],
    *[("stall_timeout", {"stall_timeout": v}, "stall_timeout") for v in (0, -1, "10")],
    *[("console", {"console": v}, "console") for v in ("lively", 3, None)],
    *[("history", {"history": v}, "history") for v in ("yes", 1, None)],
    *[("view", {"view": v}, "view") for v in ("yes", 1, None)],
    *[("replay", {"max_replay_bytes": v}, "max_replay_bytes") for v in (-1, "1")],
    *[("money", {"budget": v}, "budget") for v in (0, -2, "1")],
    *[("nesting", {"allow_nested": v}, "allow_nested") for v in ("yes", 1, None)],
]


@pytest.mark.parametrize(
    ("options", "words"), [pytest.param(o, w, id=f"{n}-{next(iter(o.values()))!r:.20}") for n, o, w in WRONG]
)
def test_a_wrong_argument_is_an_error_in_words(options: dict[str, Any], words: str) -> None:
    """It names the argument and what is wanted; InvalidArgument is a ValueError too (D6)."""
    with pytest.raises(InvalidArgument, match=words) as caught:
        sky.ComputePool(**options)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) > 20


def test_every_argument_is_tried_above() -> None:
    parameters = set(inspect.signature(sky.ComputePool.__init__).parameters) - {"self", "specs"}
    assert parameters == {name for _, options, _ in WRONG for name in options}


def test_a_spec_and_a_provider_together_are_refused() -> None:
    """D6."""
    with pytest.raises(InvalidArgument, match="not both"):
        sky.ComputePool(SPEC, provider=sky.Local())
    with pytest.raises(InvalidArgument, match="Spec"):
        sky.ComputePool("spec")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="add parentheses"):
        sky.ComputePool(SPEC, sky.Spec(provider=sky.AWS))
    with pytest.raises(InvalidArgument, match="grow and shrink"):
        sky.ComputePool(SPEC, sky.Spec(nodes=(1, 2)))


def test_of_several_specs_the_first_speaks_until_one_is_taken() -> None:
    pool = sky.ComputePool(SPEC, sky.Spec(provider=sky.SSH(["gpu1"]), nodes=1), selection="first")
    assert (pool.nodes, pool.provider, pool.spec) == (2, sky.Local(), SPEC)


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 3},
        {"accelerator": "A100"},
        {"vcpus": 2},
        {"ttl": 30},
        {"allocation": "spot"},
        {"processes_per_node": 2},
        {"min_nodes": 1},
    ],
)
def test_what_a_spec_says_is_not_said_again_beside_it(options: dict[str, Any]) -> None:
    """Otherwise one of the two would be ignored in silence."""
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        sky.ComputePool(SPEC, **options)


def test_a_pool_knows_its_ranks_before_it_is_open_where_a_number_was_given() -> None:
    assert (sky.ComputePool(nodes=2).world_size, sky.ComputePool(nodes=2).slots) == (2, 2)
    pool = sky.ComputePool(sky.Spec(nodes=3, processes_per_node=4), concurrency=2)
    assert (pool.world_size, pool.slots) == (12, 24)
    assert sky.ComputePool(processes_per_node="gpu").spec.processes_per_node == "gpu"


def test_a_spec_is_taken_as_it_is() -> None:
    pool = sky.ComputePool(sky.Spec(provider=sky.Local(), nodes=3, accelerator="T4"))
    assert pool.nodes == 3
    assert pool.spec.accelerator is not None
    assert pool.provider == sky.Local()


def test_the_defaults_are_one_node_on_this_computer() -> None:
    """D6: neither spec nor provider means Local; no default time limit on a call."""
    pool = sky.ComputePool()
    assert (pool.nodes, pool.concurrency, pool.provider, pool.image) == (1, 1, sky.Local(), sky.Image())
    assert pool.worker == sky.Worker()
    assert pool.plugins == ()
    assert not pool.is_active
    assert pool.current_nodes() == 0


def test_concurrency_is_short_for_a_worker() -> None:
    """D6."""
    assert sky.ComputePool(concurrency=3).worker == sky.Worker(concurrency=3)
    assert sky.ComputePool(worker=sky.Worker(3, "process")).concurrency == 3


def test_accelerators_are_given_by_name_or_as_such() -> None:
    """S1-07."""
    by_name = sky.ComputePool(accelerator="A100").spec.accelerator
    assert by_name == sky.ComputePool(accelerator=sky.accelerators.A100()).spec.accelerator
    assert by_name is not None


def test_names_are_made_up_unless_given_and_differ() -> None:
    names = {sky.ComputePool().name for _ in range(20)}
    assert len(names) == 20
    assert all(0 < len(name) <= 63 for name in names)
    assert sky.ComputePool(name="my-pool.1_a").name == "my-pool.1_a"


def test_a_pool_that_is_not_open_refuses_calls_and_says_so() -> None:
    """D6: a RuntimeError."""
    pool = sky.ComputePool()
    with pytest.raises(RuntimeError, match="not open yet"):
        sky.compute(len)([1]) >> pool
    with pytest.raises(sky.errors.PoolClosed):
        _ = pool.executor
    with pytest.raises(sky.errors.PoolClosed):
        pool.dask()
    pool.close()


def test_a_repr_says_what_it_is_and_holds_no_secret() -> None:
    pool = sky.ComputePool(name="quiet", nodes=2, image=sky.Image(env={"TOKEN": "s3cret"}))
    assert repr(pool) == "<ComputePool quiet new, 2 x Local>"


def test_an_unknown_argument_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="node"):
        sky.ComputePool(node=2)  # type: ignore[call-arg]


def test_a_spec_for_accelerators_that_this_computer_lacks_is_no_alternative() -> None:
    """It costs nothing, and would be taken before all others."""
    if count_accelerators() >= 8:
        pytest.skip("this computer has them")
    with pytest.raises(InvalidArgument, match=r"Say which provider has them: sky.Spec\(provider=sky.AWS\(\)"):
        sky.ComputePool(sky.Spec(accelerator="A100:8"), sky.Spec(provider=sky.AWS(), accelerator="A100:8"))


def test_a_plan_has_offers_and_a_price_whoever_has_the_machines() -> None:
    several = sky.ComputePool(SPEC, sky.Spec(provider=sky.SSH(["gpu1"]), nodes=1), selection="first").plan()
    for plan in (sky.plan(nodes=2), sky.ComputePool(nodes=2).plan(), several):
        assert plan.hourly_cost == 0
        assert [offer.name for offer in plan.offers] == ["this computer"]
        assert list(plan.ruled_out) == []
        assert "this computer" in str(plan)
