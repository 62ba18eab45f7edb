"""The stand-in for nvidia-smi: a host behind a machine of the test cloud passes for one of its type."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.accelerators import resolve
from skyward.api.hardware import Found
from skyward.api.matching import Verdict, compare
from skyward.node import gpus
from skyward.testing import nvidia_smi
from tests.support.cloud import Instance


def instance(kind: str) -> Instance:
    return Instance("i-1", "us-east-1", "us-east-1a", kind, "spot", "10.0.0.1", None, "", "", (), {}, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "requested"),
    [
        ("g4dn.xlarge", "T4"),
        ("g4dn.12xlarge", "T4:4"),
        ("g5g.xlarge", "T4G"),
        ("g5.xlarge", "A10G"),
        ("g6.xlarge", "L4"),
        ("g6e.xlarge", "L40S"),
        ("g7e.2xlarge", "RTX_PRO_6000"),
        ("p3dn.24xlarge", "V100-32GB:8"),
        ("p4d.24xlarge", "A100-40GB:8"),
        ("p5.48xlarge", "H100:8"),
        ("p5en.48xlarge", "H200:8"),
        ("p6-b200.48xlarge", "B200:8"),
    ],
)
def test_a_machine_of_the_test_cloud_has_the_gpus_of_its_type(
    kind: str, requested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = nvidia_smi(instance(kind))
    assert text is not None
    (tmp_path / "nvidia-smi").write_text(text)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cards = gpus._from_smi()
    assert len({card.gpu.uuid for card in cards}) == len(cards)
    wanted = resolve(requested)
    assert wanted is not None
    assert compare(wanted, Found(tuple(card.gpu for card in cards), len(cards))) == Verdict()


def test_a_machine_without_gpus_needs_none() -> None:
    assert nvidia_smi(instance("c5.large")) is None
