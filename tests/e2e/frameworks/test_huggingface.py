"""Hugging Face on real nodes: a login that stays secret, and the Trainer over two of them; nothing is downloaded."""

from __future__ import annotations

import glob
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky

TOKEN = "hf_canary" + os.urandom(8).hex()
PLUGINS = (sky.plugins.torch(), sky.plugins.huggingface(token=TOKEN))


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[sky.ComputePool, list[str]]]:
    """A pool of two nodes with both plugins, and everything that it said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_TOKEN", raising=False)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("connections")))
        opened = sky.ComputePool(nodes=2, plugins=PLUGINS, console=False)
        opened.on_event(lambda event: said.append(repr(event)))
        with opened:
            yield opened, said


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """The module's pools outlive a single test."""


@sky.compute
def login() -> dict[str, Any]:
    """What the hub's client of this process knows, and what anybody could see of the process."""
    import subprocess

    from huggingface_hub import constants, get_token

    path = Path(constants.HF_TOKEN_PATH)
    child = "import huggingface_hub as hub; print(hub.get_token())"
    info = sky.instance_info()
    assert info is not None
    return {
        "token": get_token(),
        "variable": os.environ.get("HF_TOKEN"),
        "file": path.read_text(),
        "mode": stat.S_IMODE(path.stat().st_mode),
        "directory": stat.S_IMODE(path.parent.stat().st_mode),
        "child": subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip(),
        "place": str(path.parent),
        "topology": info.to_json(),
    }


def command_lines() -> list[bytes]:
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            found.append(Path(path).read_bytes())
        except OSError:
            continue  # it has just ended
    return found


def test_every_node_is_logged_in(trainers: tuple[sky.ComputePool, list[str]]) -> None:
    """S1-25, S1-26, S4-29, T5."""
    for found in login() @ trainers[0]:
        assert found["token"] == found["variable"] == found["file"] == found["child"] == TOKEN
        assert (found["mode"], found["directory"]) == (0o600, 0o700)
        assert TOKEN not in found["topology"]


def test_the_token_is_seen_nowhere_else(trainers: tuple[sky.ComputePool, list[str]]) -> None:
    """SEC-9, SEC-10, SEC-13: not in a command line, an event, a file, nor in the environment a process began with."""
    pool, said = trainers
    (login() & login()) >> pool
    assert not [line for line in command_lines() if TOKEN.encode() in line]
    assert not [text for text in said if TOKEN in text]
    assert TOKEN not in repr(pool) + repr(pool.plugins)
    assert not [path for path in _our_files() if TOKEN.encode() in _bytes(path)]
    began_with = [Path(p) for p in glob.glob("/proc/[0-9]*/environ")]
    assert not [path for path in began_with if TOKEN.encode() in _bytes(path)]


def _our_files() -> list[Path]:
    ours = [
        path
        for root in {"/dev/shm", tempfile.gettempdir()}
        for path in Path(root).glob(f"skyward-{os.getpid()}-*/**/*")
    ]
    found = [*ours, *Path(os.environ["HF_HOME"]).glob("**/*")]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_login_of_the_user_is_neither_used_nor_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes on this computer must not write into the user's own connections directory; all of ours goes on close."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "token").write_text("hf_theirs")
    with sky.ComputePool(plugins=[sky.plugins.huggingface(token=TOKEN)], console=False) as one:
        found = login() >> one
    assert found["file"] == found["token"] == TOKEN
    assert (tmp_path / "token").read_text() == "hf_theirs"
    assert not Path(found["place"]).exists()


def test_a_killed_runner_leaves_no_token_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with sky.ComputePool(plugins=[sky.plugins.huggingface(token=TOKEN)], console=False) as one:
        found = login() >> one
        with pytest.raises(sky.errors.TaskCrashed):
            sky.compute(os._exit)(1) >> one
        assert (login() >> one)["token"] == TOKEN
        assert not Path(found["place"], "token").exists()


def tune(seed: int = 0) -> dict[str, Any]:
    """A tiny GPT made from a config, trained and evaluated by the Trainer."""
    import tempfile

    import torch
    import torch.distributed as dist
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))  # DDP has to make the first weights equal
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    rows = [{"input_ids": [(start + i) % 16 for i in range(8)]} for start in range(48)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=4,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=5,  # so that the nodes' parts are uneven
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows))
        trainer.train()
        found = trainer.evaluate()
        predicted = trainer.predict(Dataset.from_list(rows)).predictions
    return {
        "world": (arguments.process_index, arguments.world_size, arguments.parallel_mode.value),
        "loss": found["eval_loss"],
        "predicted": (predicted.shape, float(predicted.sum())),
        "weights": float(torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()),
    }


def check(results: list[dict[str, Any]]) -> None:
    assert [result["world"] for result in results] == [(0, 2, "distributed"), (1, 2, "distributed")]
    for part in ("loss", "weights", "predicted"):
        assert results[0][part] == results[1][part]
    assert results[0]["predicted"][0][0] == 48


def test_the_trainer_uses_the_plugins_group(trainers: tuple[sky.ComputePool, list[str]]) -> None:
    """S1-27, S4-29, S0-36: it finds rank and world size, and evaluates alike on both nodes."""
    check(sky.compute(tune)() @ trainers[0])


def test_the_trainer_uses_the_decorators_group(pool: sky.ComputePool) -> None:
    """S0-32, S0-33, S0-35, X8."""
    check(sky.compute(sky.integrations.transformers(backend="gloo")(tune))() @ pool)


def test_one_node_needs_no_decorator_and_can_have_one() -> None:
    """S0-34, S1-27: alone it is not distributed; with the decorator it is a group of one, and learns the same."""
    with sky.ComputePool(plugins=[sky.plugins.huggingface(token=TOKEN)], console=False) as one:
        alone = sky.compute(tune)() >> one
        bare = sky.compute(sky.integrations.transformers(tune))() >> one
    assert alone["world"][:2] == bare["world"][:2] == (0, 1)
    assert alone["loss"] == pytest.approx(bare["loss"])


def test_nccl_without_cuda_is_refused_in_words(pool: sky.ComputePool) -> None:
    """S0-32 as it is written, on nodes that cannot do it."""
    with pytest.raises(ValueError, match='backend="gloo"'):
        sky.compute(sky.integrations.transformers(backend="nccl")(tune))() @ pool


def test_a_node_without_transformers_says_what_to_add() -> None:
    @sky.compute
    def hide() -> None:
        from importlib.machinery import PathFinder

        real = PathFinder.find_spec
        PathFinder.find_spec = lambda name, *rest: None if name == "transformers" else real(name, *rest)  # type: ignore[method-assign]

    with sky.ComputePool(console=False) as bare:
        hide() >> bare
        with pytest.raises(ModuleNotFoundError, match=r"sky\.plugins\.huggingface"):
            sky.compute(sky.integrations.transformers(tune))() >> bare


def test_the_token_is_in_no_command_line_while_pools_open_and_close() -> None:
    """SEC-10: looked at all the time."""
    hits: list[bytes] = []
    done = False

    def look() -> None:
        while not done:
            hits.extend(line for line in command_lines() if TOKEN.encode() in line)
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            with sky.ComputePool(plugins=[sky.plugins.huggingface(token=TOKEN)], console=False) as one:
                login() >> one
        finally:
            done = True
        looking.result()
    assert hits == []
