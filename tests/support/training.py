"""Training bodies for several ranks, as users of accelerate and the Trainer write them; nothing is downloaded.

They ask the framework alone who they are, so they run unchanged under torchrun, with one rank a node or with several.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["check_ranks", "train_with_accelerate", "train_with_trainer"]


def train_with_accelerate(epochs: int = 3, rows: int = 64, batch_size: int = 8, **options: Any) -> dict[str, Any]:
    """A line fitted with accelerate's loop; `options` go to the Accelerator."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import gather_object, set_seed
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(**options)
    set_seed(0)
    x = torch.linspace(-1, 1, rows).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=batch_size, shuffle=True)
    torch.manual_seed(accelerator.process_index)  # different first weights: DDP has to make them equal
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            total += accelerator.gather(loss.detach()).mean().item()
        losses.append(total / len(loader))
    accelerator.wait_for_everyone()
    return {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "local_rank": accelerator.local_process_index,
        "ranks": gather_object([accelerator.process_index]),
        "type": str(accelerator.distributed_type),
        "steps": len(loader),
        "losses": losses,
        "weights": _weights(accelerator.unwrap_model(model)),
    }


def train_with_trainer(
    rows: int = 48, *, wait_in_rank: int | None = None, directory: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """A tiny GPT made from a config, trained, evaluated and asked by the Trainer.

    `arguments` go to TrainingArguments. With `directory`, rank `wait_in_rank` writes a file there at its second step
    and waits until somebody ends it.
    """
    import tempfile
    import time
    from pathlib import Path

    import torch
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Waits(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if directory and state.global_step == 1 and args.process_index == wait_in_rank:
                Path(directory, "waits").write_text(str(os.getpid()))
                time.sleep(3600)

    set_seed(int(os.environ.get("RANK", "0")))  # different first weights: DDP has to make them equal
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    data = [{"input_ids": [(start + i) % 16 for i in range(8)]} for start in range(rows)]
    dataset = Dataset.from_list([row | {"labels": row["input_ids"]} for row in data])
    with tempfile.TemporaryDirectory() as output:
        usual: dict[str, Any] = {
            "output_dir": output,
            "max_steps": 8,
            "learning_rate": 0.02,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 5,  # so that the ranks' parts are uneven
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        made = TrainingArguments(**usual | arguments)
        trainer = Trainer(model, made, train_dataset=dataset, eval_dataset=dataset, callbacks=[Waits()])
        trainer.train()
        evaluation = trainer.evaluate()
        predicted = trainer.predict(dataset).predictions
    return {
        "rank": made.process_index,
        "world_size": made.world_size,
        "local_rank": made.local_process_index,
        "type": made.parallel_mode.value,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluation": evaluation,
        "predicted": (predicted.shape, float(predicted.sum())),
        "weights": _weights(model),
        "device": str(torch.get_default_device()),
    }


def check_ranks(results: list[dict[str, Any]], local: int = 1) -> None:
    """One training over all ranks, `local` of them a node: every rank counted, equal weights, a loss that went down."""
    count = len(results)
    assert [(each["rank"], each["world_size"]) for each in results] == [(rank, count) for rank in range(count)]
    assert [each["local_rank"] for each in results] == [rank % local for rank in range(count)]
    for part in results[0].keys() & {"weights", "ranks", "predicted", "steps"}:
        assert [each[part] for each in results] == [results[0][part]] * count, part
    head = results[0]
    assert head["losses"][-1] < head["losses"][0]
    if "evaluation" in head:
        assert len({each["evaluation"]["eval_loss"] for each in results}) == 1
        assert head["evaluation"]["eval_loss"] < head["losses"][0]


def _weights(model: Any) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
