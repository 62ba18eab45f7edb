"""Which backend a torch group has, and which GPU each of its ranks uses."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

from skyward.api.info import InstanceInfo
from skyward.errors import InvalidArgument
from skyward.plugins._ranks import called, gpu_by_local_rank, say, this_rank
from skyward.plugins._within import framework

__all__ = ["Backend", "agreed_backend", "check_backend", "on_own_gpu", "possible", "use_own_gpu"]

Backend = Literal["nccl", "gloo"]
_GLOO = "{why}: the torch group uses gloo, since NCCL needs a GPU for each rank."
_TRAINER = " accelerate and the Trainer use the CPU."


def _gloo(info: InstanceInfo) -> str:
    return _GLOO.format(why=info.gpu_conflict) + (_TRAINER if find_spec("accelerate") else "")


def check_backend(backend: Backend | None, info: InstanceInfo) -> None:
    """Refuses NCCL where torch finds no GPU."""
    if backend == "nccl" and not _finds_cuda():
        torch = framework("torch", "torch")
        raise InvalidArgument(
            f'backend="nccl" cannot work on {this_rank(info)}: PyTorch {torch.__version__} finds no CUDA device there. '
            'Write backend="gloo" for CPUs, or leave backend out to have it chosen by what the node has.'
        )


def agreed_backend(backend: Backend | None, info: InstanceInfo, store: Any) -> Backend:
    """The backend of the group, the same on all ranks: what the user says, else NCCL if each has a GPU of its own."""
    if backend is not None:
        return backend
    if info.gpu_conflict is not None:
        say(info, _gloo(info))
        return "gloo"
    if not info.node_gpus:
        return "gloo"  # none of the others has one either, or there would be a conflict
    return _voted_backend(info, store, _finds_cuda())


def possible(asked: dict[str, Any], info: InstanceInfo) -> dict[str, Any]:
    """What a program asks of `init_process_group`, with gloo instead of NCCL where not every rank has a GPU."""
    if info.gpu_conflict is None or "nccl" not in (asked.get("backend") or "nccl").lower():
        return asked
    say(info, _gloo(info))
    return {**asked, "backend": "gloo", "device_id": None}


def use_own_gpu(info: InstanceInfo) -> None:
    """Has torch use this rank's own GPU where code does not say which."""
    own = gpu_by_local_rank(info)
    if own and _finds_cuda():  # number 0 is what torch takes anyway
        framework("torch", "torch").cuda.set_device(own)


@contextmanager
def on_own_gpu(info: InstanceInfo) -> Generator[None]:
    """A call with this rank's own GPU as the current one, which torch keeps for each thread."""
    use_own_gpu(info)
    yield


def _finds_cuda() -> bool:
    return framework("torch", "torch").cuda.is_available()


def _voted_backend(info: InstanceInfo, store: Any, found: bool) -> Backend:
    """NCCL if torch finds a GPU on every rank. A wheel for CPUs, or an old driver, on one of them decides for all."""
    votes = [f"skyward/cuda/{rank}" for rank in range(info.world_size)]
    store.set(votes[info.rank], "1" if found else "0")
    without = [rank for rank, vote in enumerate(store.multi_get(votes)) if vote == b"0"]
    if without and len(without) < info.world_size:
        say(info, f"torch finds no GPU on {called(info, without)}: the torch group uses gloo.")
    return "gloo" if without else "nccl"
