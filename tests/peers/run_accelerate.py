"""Runs accelerate's own test scripts on two nodes: what `accelerate test` starts, and those beside it that fit CPUs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from figures import Figures, tried

import skyward as sky

__all__ = ["main"]

SCRIPTS = ("test_script", "test_sync", "test_distributed_data_loop")  # the first is `accelerate test`
JOIN = "accelerate joins uneven inputs on several GPUs only; on CPUs it warns, and then waits"
SKIPPED: dict[str, str] = {
    "test_ops": "begins with PartialState(), which takes CPU ranks for programs alone, under accelerate launch too",
    "test_distributed_data_loop: test_can_join_uneven_inputs": JOIN,
    "test_distributed_data_loop: test_join_can_override_even_batches": JOIN,
    "test_distributed_data_loop: test_join_can_override_for_mixed_type_dataloaders": JOIN,
    "test_distributed_data_loop: test_join_raises_warning...": JOIN,
    "test_distributed_data_loop: test_stateful_dataloader": "needs torchdata",
    "test_ddp_comm_hook": "names a GPU for its model",
    "test_merge_weights": "an FSDP plugin, which looks for a GPU",
}
_LIMIT = 300.0


def body(name: str) -> int:
    """Runs one script as it is, less what is skipped; how many processes it saw."""
    module: Any = import_module(f"accelerate.test_utils.scripts.{name}")
    from accelerate.state import PartialState

    seen: list[int] = []
    destroy = PartialState.destroy_process_group

    def looked(state: Any, group: Any = None) -> None:
        seen.append(state.num_processes)
        destroy(state, group)

    PartialState.destroy_process_group = looked  # type: ignore[method-assign]
    try:
        if name == "test_distributed_data_loop":
            _data_loop(module)
        else:
            module.main()
    finally:
        PartialState.destroy_process_group = destroy  # type: ignore[method-assign]
    return seen[-1] if seen else PartialState._shared_state["num_processes"]


def _data_loop(module: Any) -> None:
    """What its `main` does on CPUs."""
    from torch.utils.data import DataLoader

    module.test_default_ensures_even_batch_sizes()
    module.test_can_disable_even_batches()
    module.test_pickle_accelerator()
    accelerator = module.create_accelerator()
    for shuffle in (False, True):
        loader = DataLoader(module.DummyDataset(), shuffle=shuffle, batch_size=4, num_workers=2)
        module.test_data_loader(loader, accelerator)
    accelerator.end_training()


def main() -> Figures:
    """Every script in every way in which a body may find the other nodes."""
    with (
        sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], console=False) as grouped,
        sky.ComputePool(nodes=2, console=False) as plain,
    ):
        doors: dict[str, tuple[Callable[[Any], Any], sky.ComputePool]] = {
            "plugin": (lambda fn: fn, grouped),
            "torch decorator": (sky.integrations.torch(), plain),
            "transformers decorator": (sky.integrations.transformers(), plain),
        }

        def run(name: str, door: str) -> None:
            decorate, pool = doors[door]
            seen = sky.compute(timeout=_LIMIT)(decorate(body))(name) @ pool
            assert seen == [2, 2], f"it saw {seen} processes, not 2 on each node"

        tests = [(f"{name}, {door}", lambda n=name, d=door: run(n, d)) for name in SCRIPTS for door in doors]
        return tried("accelerate's scripts", tests, SKIPPED)


if __name__ == "__main__":
    print(main())
