"""What an agent says of its machine is checked, and what it really says passes."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from skyward.api.hardware import Gpu
from skyward.client.message_checks import checked_about


@pytest.mark.parametrize(
    "gpu",
    [Gpu(0, "GPU-1", "Tesla T4", 16 << 30), Gpu(3, "MIG-1", "A100", card="GPU-1"), Gpu(0, "", "MI300X", vendor="amd")],
)
def test_the_gpus_that_a_node_finds_are_accepted_in_its_greeting(gpu: Gpu) -> None:
    greeting = {"gpus": [asdict(gpu)]}
    assert checked_about(greeting) == greeting
    with pytest.raises(Exception, match="a greeting whose gpus"):
        checked_about({"gpus": [asdict(gpu) | {"index": "0"}]})
