"""How many GPUs a machine has, by each way to ask."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from skyward.node import gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,2", 2),
        (" 3 , 1 ", 2),
        ("0,9,1", 1),
        ("0,0", 0),
        ("GPU-bb", 1),
        ("GPU-b", 0),
        ("GPU-aa,GPU-cc", 2),
        ("MIG-0c1d", 1),
        ("none", 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_does(visible: str | None, count: int) -> None:
    """S1-42."""
    uuids = ["GPU-aa00", "GPU-bb00", "GPU-bc00", "GPU-cc00"]
    assert gpus._count_visible(uuids, visible) == count


def test_cards_are_read_from_the_driver(tmp_path: Path) -> None:
    """S1-42: without any package."""
    for address, uuid in (("0000:3b:00.0", "GPU-1f"), ("0000:18:00.0", "GPU-0e")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t NVIDIA H200\nGPU UUID: \t {uuid}\n")
    assert gpus._uuids_from_proc(str(tmp_path)) == ["GPU-0e", "GPU-1f"]
    assert gpus._uuids_from_proc(str(tmp_path / "absent")) == []


def test_cards_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA T4 (UUID: GPU-aa)'\necho 'GPU 1: NVIDIA T4 (UUID: GPU-bb)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus._uuids_from_smi() == ["GPU-aa", "GPU-bb"]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert gpus._uuids_from_smi() == []


def test_cards_are_read_through_nvml_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failure(Exception):
        pass

    closed: list[bool] = []
    nvml = types.SimpleNamespace(
        NVMLError=Failure,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}".encode() if handle else f"GPU-{handle}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus._uuids_from_nvml() == ["GPU-0", "GPU-1"]
    assert closed == [True]
    assert gpus.count_accelerators() == 1

    def no_driver() -> None:
        raise Failure

    nvml.nvmlInit = no_driver
    assert gpus._uuids_from_nvml() == []


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="this machine has NVIDIA cards")
def test_a_machine_without_cards_counts_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """T7, S1-42."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.count_accelerators() == 0
