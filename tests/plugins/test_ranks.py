"""What the plugins of frameworks know of a rank, and how a torch group's ranks agree on a backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyward.plugins import _jax, _ranks
from skyward.plugins._accelerate import variables
from skyward.plugins._ranks import called, everyone, gpu_by_local_rank, gpu_positions, show_node_gpus, this_rank
from skyward.plugins._torch import agreed_backend, possible
from tests.support.ranks import rank


@pytest.fixture(autouse=True)
def nothing_was_said_or_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ranks, "_said", set())
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def test_ranks_are_called_nodes_where_each_node_has_one() -> None:
    info = rank(1, ranks=1, nodes=4)
    assert (this_rank(info), called(info, [0, 2, 3]), everyone(info)) == ("node 1", "nodes 0, 2 and 3", "all 4 nodes")


def test_ranks_are_named_with_their_nodes_where_a_node_has_several() -> None:
    info = rank(1, ranks=2, nodes=2)
    assert this_rank(info) == "rank 1 (on node 0)"
    assert called(info, [0, 3]) == "ranks 0 (on node 0) and 3 (on node 1)"
    assert everyone(info) == "all 4 ranks"


def test_a_framework_sees_all_gpus_of_the_node_and_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    info = rank(1, node_gpus=("4", "5"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert gpu_positions(info) == [0]
    show_node_gpus(info)
    assert _ranks.os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert gpu_positions(info) == [1]
    assert gpu_by_local_rank(info) == 1


def test_torch_takes_the_gpu_with_its_local_rank_also_where_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    info = rank(1, node_gpus=("0", "1", "2", "3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert gpu_by_local_rank(info) == 0  # CUDA was used before: the process sees its own
    show_node_gpus(info)
    assert gpu_by_local_rank(info) == 1
    assert gpu_by_local_rank(rank(0, ranks=1, nodes=2)) is None


@pytest.mark.parametrize("gpus", [("0",), ("MIG-a", "MIG-b"), ()])
def test_a_rank_that_shares_a_gpu_or_has_a_slice_sees_that_alone(
    gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = rank(1, node_gpus=gpus)
    own = gpus[-1] if gpus else ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    show_node_gpus(info)
    assert _ranks.os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert gpu_positions(info) == ([0] if gpus else [])


def test_a_process_that_has_the_machine_to_itself_uses_all_gpus() -> None:
    info = rank(0, ranks=1, node_gpus=("0", "1", "2"))
    show_node_gpus(info)
    assert "CUDA_VISIBLE_DEVICES" not in _ranks.os.environ
    assert gpu_positions(info) == [0, 1, 2]


def test_spaces_in_the_users_variable_hide_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert gpu_positions(rank(0, ranks=1, node_gpus=("3", "1"))) == [0, 1]


def test_ranks_that_share_a_gpu_use_gloo_and_say_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    conflict = "2 ranks share 1 GPU on this computer"
    for number in (0, 1, 0):
        info = rank(number, node_gpus=("0",), gpu_conflict=conflict)
        assert agreed_backend(None, info, None) == "gloo"
    said = capsys.readouterr().err
    assert said.startswith(f"{conflict}: the torch group uses gloo, since NCCL needs a GPU for each rank.")
    assert said.count("\n") == 1


def test_accelerate_goes_to_the_cpu_where_ranks_share_a_gpu() -> None:
    """It takes a group that has GPUs for one of NCCL: the Trainer's evaluation failed in a gather."""
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    shared = rank(0, node_gpus=("0",), gpu_conflict="2 ranks share 1 GPU on this computer")
    assert variables(torch, shared) == {"ACCELERATE_USE_CPU": "true"}
    assert variables(torch, rank(0, node_gpus=("0", "1"))) == {}


def test_a_backend_that_the_user_names_counts() -> None:
    info = rank(0, node_gpus=("0",), gpu_conflict="2 ranks share 1 GPU on this computer")
    assert agreed_backend("nccl", info, None) == "nccl"
    assert agreed_backend("gloo", rank(0, node_gpus=("0", "1")), None) == "gloo"


@pytest.mark.parametrize("backend", ["nccl", None, "cpu:gloo,cuda:nccl"])
def test_a_program_that_asks_for_nccl_gets_gloo_where_ranks_share_a_gpu(backend: str | None) -> None:
    shared = rank(0, node_gpus=("0",), gpu_conflict="2 ranks share 1 GPU on this computer")
    asked = {"backend": backend, "device_id": "cuda:0", "timeout": 3}
    assert possible(asked, shared) == {"backend": "gloo", "device_id": None, "timeout": 3}
    assert possible(asked, rank(0, node_gpus=("0", "1"))) == asked
    assert possible({"backend": "gloo"}, shared) == {"backend": "gloo"}


def test_without_gpus_nobody_is_asked() -> None:
    assert agreed_backend(None, rank(0), None) == "gloo"


class Jax:
    """Stands for a JAX that was imported before: remembers what it is told."""

    def __init__(self) -> None:
        self.config = self
        self.told: list[tuple[str, str]] = []

    def update(self, name: str, value: str) -> None:
        self.told.append((name, value))


def test_jax_uses_the_cpu_where_ranks_share_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    jax, info = Jax(), rank(0, node_gpus=("0",), gpu_conflict="2 ranks share 1 GPU on this computer")
    _jax.avoid_shared_gpus(jax, info)
    assert jax.told == [("jax_platforms", "cpu")]
    assert _ranks.os.environ["JAX_PLATFORMS"] == "cpu"
    assert _jax.variables(info)["JAX_LOCAL_DEVICE_COUNT"] == "1"
    assert _jax._device_ids(info) == []
    assert capsys.readouterr().err == (
        "2 ranks share 1 GPU on this computer: JAX uses the CPU, since its ranks need a GPU each.\n"
    )


def test_a_platform_that_the_user_chose_for_jax_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    jax = Jax()
    _jax.avoid_shared_gpus(jax, rank(0, node_gpus=("0",), gpu_conflict="2 ranks share 1 GPU on this computer"))
    assert jax.told == []


def test_jax_uses_the_gpus_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    info = rank(1, node_gpus=("0", "1", "2", "3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert _jax._device_ids(info) == [0, 1]
    assert _jax.variables(info)["JAX_LOCAL_DEVICE_COUNT"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert _jax._device_ids(info) == [2, 3]
