"""What an agent says of its machine is checked, and what it really says passes."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from skyward.api.hardware import Gpu
from skyward.node.settings import FoundGpu, checked_greeting

WELCOME = {"incarnation": "x", "received": 0, "session": "s"}


@pytest.mark.parametrize(
    "gpu",
    [Gpu(0, "GPU-1", "Tesla T4", 16 << 30), Gpu(3, "MIG-1", "A100", card="GPU-1"), Gpu(0, "", "MI300X", vendor="amd")],
)
def test_the_gpus_that_a_node_finds_are_accepted_in_its_greeting(gpu: Gpu) -> None:
    greeting = {**WELCOME, "gpus": [asdict(gpu)]}
    assert checked_greeting(greeting, "s") == greeting
    with pytest.raises(ValueError, match="the field index of 'foundgpu' cannot be 0"):
        checked_greeting({**WELCOME, "gpus": [asdict(gpu) | {"index": "0"}]}, "s")
    with pytest.raises(ValueError, match="more than a GPU has"):
        checked_greeting({**WELCOME, "gpus": [asdict(gpu) | {"color": "red"}]}, "s")


def test_a_gpu_in_a_greeting_has_the_fields_of_a_gpu() -> None:
    assert FoundGpu.__annotations__.keys() == {field.name for field in fields(Gpu)}
