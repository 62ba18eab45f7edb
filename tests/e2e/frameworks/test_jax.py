"""JAX over real nodes on this computer: one group, one mesh, one start per process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

import skyward as sky

OTHERS = ("torch", "keras", "tensorflow", "transformers")


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.jax()], console=False) as opened:
        yield opened


def sums() -> tuple[float, float, list[float]]:
    """What jit over one mesh, and pmap with psum, make of numbers that differ by node."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    mesh = jax.make_mesh((jax.device_count(),), ("nodes",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("nodes"))
    own = np.arange(4.0, dtype=np.float32) + 10 * jax.process_index()
    whole = jax.make_array_from_process_local_data(rows, own)
    assert whole.shape == (4 * jax.device_count(),)
    total = jax.jit(jnp.sum)(whole)
    ranks = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.full((1,), jax.process_index() + 1.0))
    return float(total), float(jax.jit(jnp.max)(whole)), [float(x) for x in ranks]


@sky.compute
def undecorated() -> tuple[float, float, list[float]]:
    return sums()


@sky.compute
@sky.integrations.jax()
def decorated() -> tuple[float, float, list[float]]:
    return sums()


@sky.compute
def look() -> dict[str, Any]:
    """What a body sees in its first line."""
    values = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    loaded = [name for name in ("jax", *OTHERS) if name in sys.modules]
    info = sky.instance_info()
    assert info is not None
    if "jax" not in loaded:
        return {"env": values, "loaded": loaded, "pid": os.getpid()}
    import jax

    return {
        "env": values,
        "loaded": loaded,
        "pid": os.getpid(),
        "joined": jax.distributed.is_initialized(),
        "devices": (jax.device_count(), jax.local_device_count(), jax.process_index()),
        "ports": dict(info.ports),
        "nccl": os.environ.get("NCCL_SOCKET_IFNAME"),
    }


def test_a_body_finds_variables_and_group_ready(pool: sky.ComputePool) -> None:
    """S0-02, S0-29, S0-30, S1-05, S1-12, S1-22, T8."""
    seen = look() @ pool
    for node, place in enumerate(seen):
        assert place["env"] == {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{place['ports']['jax']}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(node),
            "JAX_LOCAL_DEVICE_COUNT": "1",
        }
        assert place["joined"]
        assert place["devices"] == (2, 1, node)
        assert place["nccl"] == "lo"


def test_only_the_framework_that_is_used_is_imported(pool: sky.ComputePool) -> None:
    """S0-06."""
    assert [place["loaded"] for place in look() @ pool] == [["jax"]] * 2


def test_all_devices_of_all_nodes_are_one_mesh(pool: sky.ComputePool) -> None:
    """S0-31, S1-23."""
    assert undecorated() @ pool == [(52.0, 13.0, [3.0])] * 2


def test_the_group_is_formed_once_for_all_calls(pool: sky.ComputePool) -> None:
    """S4-28, X1: the decorator finds the plugin's group and does nothing."""
    before = [place["pid"] for place in look() @ pool]
    assert decorated() @ pool == undecorated() @ pool
    assert decorated() @ pool == undecorated() @ pool
    assert [place["pid"] for place in look() @ pool] == before


def test_one_call_on_one_node_waits_for_nobody(pool: sky.ComputePool) -> None:
    @sky.compute
    def local() -> float:
        import jax.numpy as jnp

        return float(jnp.arange(4.0).sum())

    assert local() >> pool == 6.0


def test_xla_starts_no_more_threads_than_this_nodes_share(pool: sky.ComputePool) -> None:
    @sky.compute
    def workers() -> tuple[int, int]:
        import jax.numpy as jnp

        (jnp.ones((256, 256)) @ jnp.ones((256, 256))).block_until_ready()
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        return sum("XLAEigen" in name for name in names), int(os.environ["OMP_NUM_THREADS"])

    for started, share in workers() @ pool:
        assert 0 < started <= share


def test_a_rank_that_dies_fails_the_call_and_the_next_group_is_a_new_one(pool: sky.ComputePool) -> None:
    """Rows 16 and 18 of the faults: a group after a crash."""

    @sky.compute
    def dies() -> None:
        info = sky.instance_info()
        if info is not None and info.node == 1:
            os._exit(7)
        sums()

    before = look() @ pool
    with pytest.raises(sky.errors.TaskCrashed, match="status 7"):
        dies() @ pool
    assert undecorated() @ pool == [(52.0, 13.0, [3.0])] * 2
    after = look() @ pool
    assert {place["pid"] for place in before}.isdisjoint(place["pid"] for place in after)
    assert all(place["joined"] for place in after)


def test_torch_and_a_second_pool_do_not_get_in_the_way(pool: sky.ComputePool) -> None:
    """T15: jax and torch on one pool, beside another pool with a group."""

    @sky.compute
    def both() -> tuple[float, tuple[float, float, list[float]]]:
        import torch
        import torch.distributed as dist

        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones), sums()

    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch(), sky.plugins.jax()], console=False) as other:
        assert both() @ other == [(2.0, (52.0, 13.0, [3.0]))] * 2
        assert undecorated() @ pool == [(52.0, 13.0, [3.0])] * 2


def test_on_one_node_the_plugin_only_installs() -> None:
    """T8, as S4-15."""
    with sky.ComputePool(plugins=[sky.plugins.jax()], console=False) as single:
        place = look() >> single
    assert place["env"] == {}
    assert place["loaded"] == []


def test_on_one_node_the_decorator_forms_a_group_of_one() -> None:
    """S0-29, S0-30: the same body runs on one node and on several."""
    with sky.ComputePool(console=False) as single:
        assert decorated() >> single == (6.0, 3.0, [1.0])
        place = look() >> single
    assert place["joined"]
    assert (place["env"]["JAX_NUM_PROCESSES"], place["env"]["JAX_PROCESS_ID"]) == ("1", "0")


def test_the_decorator_alone_joins_the_nodes_and_says_so_when_it_is_too_late() -> None:
    """S0-12, S0-29 to S0-31; a group cannot be formed in a process that has used JAX alone."""

    @sky.compute
    def alone() -> int:
        import jax

        return jax.device_count()

    with sky.ComputePool(nodes=2, console=False) as plain:
        assert decorated() @ plain == [(52.0, 13.0, [3.0])] * 2
        assert alone() @ plain == [2, 2]
    with sky.ComputePool(nodes=2, console=False) as plain:
        assert alone() @ plain == [1, 1]
        with pytest.raises(RuntimeError, match=r"used in this process before.*sky\.plugins\.jax"):
            decorated() @ plain


PROGRAM = """
import skyward as sky

@sky.compute
def count():
    import jax
    return jax.device_count()

if __name__ == "__main__":
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.jax()], console=False) as pool:
        print(count() @ pool)
"""


def test_a_pool_closes_its_group_without_a_word(script: Callable[..., Popen[str]]) -> None:
    """S4-28 with S4-20: all nodes leave together; JAX prints a page when one does not."""
    out, err = script(PROGRAM).communicate(timeout=120)
    assert out == "[2, 2]\n"
    assert "Terminating" not in err
    assert "Traceback" not in err


def test_a_body_on_a_jax_pool_can_be_stopped(pool: sky.ComputePool) -> None:
    """Row 17 of the faults: JAX would take SIGTERM for itself, and a stop would have to wait for SIGKILL."""

    @sky.compute
    def sleeps() -> None:
        import time

        time.sleep(100)

    with pytest.raises(sky.errors.TaskTimeout) as caught:
        sleeps().with_timeout(1) @ pool
    assert not caught.value.killed
