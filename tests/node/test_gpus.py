"""Which GPUs a machine has, by each way to ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.node import gpus

LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5a76fbf9-2b41-4ed8-a9ab-2d5d0d5c1b7e)
"""
MEMORY = """\
GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, 40960
GPU-5a76fbf9-2b41-4ed8-a9ab-2d5d0d5c1b7e, 40960
"""


def test_cards_and_slices_are_read_from_what_nvidia_smi_lists() -> None:
    sliced, whole = gpus.parse_smi(LISTING, MEMORY)
    assert [(part.name, part.memory >> 30) for part in sliced.parts] == [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20),
    ]
    assert sliced.parts[1].uuid == "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"
    assert [(gpu.index, gpu.name, gpu.memory >> 30) for gpu in whole.parts] == [(1, "NVIDIA A100-SXM4-40GB", 40)]


def test_cards_are_read_from_the_driver(tmp_path: Path) -> None:
    """S1-42: without any package."""
    for address, uuid in (("0000:3b:00.0", "GPU-1f"), ("0000:18:00.0", "GPU-0e")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t NVIDIA H200\nGPU UUID: \t {uuid}\n")
    found = [card.gpu for card in gpus._from_proc(str(tmp_path))]
    assert [(gpu.index, gpu.uuid, gpu.name) for gpu in found] == [
        (0, "GPU-0e", "NVIDIA H200"),
        (1, "GPU-1f", "NVIDIA H200"),
    ]
    assert gpus._from_proc(str(tmp_path / "absent")) == []


def test_nvidia_smi_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nif [ \"$1\" = -L ]; then echo '{LISTING}'; else echo '{MEMORY}'; fi\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus._from_smi() == gpus.parse_smi(LISTING, MEMORY)
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert gpus._from_smi() == []


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="this machine has NVIDIA cards")
def test_a_machine_without_cards_counts_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """T7, S1-42."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.visible_gpus() == ()
    assert gpus.count_accelerators() == 0


def test_devices_that_are_no_gpus_are_counted_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("neuron0", "neuron1", "neuron_sysfs", "accel0"):
        (tmp_path / "dev" / name).touch()
    assert gpus._others(str(tmp_path)) == {"neuron": 2, "tpu": 1}
    assert gpus._others(str(tmp_path / "absent")) == {}
