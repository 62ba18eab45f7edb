"""The guides' programs for PyTorch and Hugging Face run as they are."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "guides"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("06_pytorch_distributed.py", [], "rank 1: 2000 points"),
        ("07_torch_model_roundtrip.py", [], "at the end"),
        ("08_huggingface_finetuning.py", [], "rank 1 of 2: accuracy"),
        ("17_many_gpus.py", [], "rank 3 is number 1 of node 1"),
    ],
)
def test_the_program_runs_without_arguments(name: str, arguments: list[str], words: str) -> None:
    """S2-04, S2-09, S2-10."""
    done = run(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_another_provider_is_refused_in_words() -> None:
    done = run("06_pytorch_distributed.py", "--provider", "moon")
    assert done.returncode == 2
    assert "local" in done.stderr


@pytest.mark.parametrize(
    ("first", "last", "starts", "ends"),
    [
        (6, 8, "@sky.compute\n@sky.integrations.torch\ndef ", ":"),
        (21, 28, "    model = nn.Sequential(", "if dist.is_initialized() else model"),
        (30, 34, "    turned = ", "shuffle=sampler is None)"),
        (61, 64, "        totals = ", "accuracy = (totals[1] / totals[2]).item()"),
    ],
)
def test_the_lines_that_the_guide_cites_stay_in_their_place(first: int, last: int, starts: str, ends: str) -> None:
    """S2-10: decorators and def; model and guarded DDP; data, sampler, loader; all_reduce and averages."""
    text = "".join((EXAMPLES / "06_pytorch_distributed.py").read_text().splitlines(keepends=True)[first - 1 : last])
    assert text.startswith(starts)
    assert text.rstrip().endswith(ends)
    page = (ROOT / "docs" / "guides" / "pytorch-distributed.md").read_text()
    assert textwrap.dedent(text).strip("\n") in page
