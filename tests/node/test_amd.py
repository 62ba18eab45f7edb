"""AMD's GPUs, from what their driver shows under /sys."""

from __future__ import annotations

from pathlib import Path

from skyward.events import GpuSample
from skyward.node.gpus import amd_cards, amd_sample, look

MI300X = {
    "vendor": "0x1002",
    "device": "0x74a1",
    "product_name": "AMD Instinct MI300X OAM",
    "unique_id": "5a1bb2c3d4e5f607",
    "mem_info_vram_total": "206141652992",
    "mem_info_vram_used": "1610612736",
    "gpu_busy_percent": "87",
    "hwmon/hwmon4/temp1_input": "64000",
    "hwmon/hwmon4/power1_average": "512000000",
}


def card(root: Path, number: int, address: str, files: dict[str, str]) -> None:
    """A card as the kernel shows it: cardN/device is a link to the PCI device."""
    device = root / "sys/devices/pci0000:00" / address
    for name, text in files.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        (device / name).write_text(text + "\n")
    drm = root / "sys/class/drm"
    for name in (f"card{number}", f"card{number}-DP-1"):
        (drm / name).mkdir(parents=True)
    (drm / f"card{number}" / "device").symlink_to(device)


def machine(root: Path, *cards: dict[str, str]) -> str:
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/kfd").touch()
    for number, files in enumerate(cards):
        card(root, number, f"0000:{0xF0 - number:02x}:00.0", files)
    return str(root)


def test_cards_have_names_and_memory_and_are_counted_by_address(tmp_path: Path) -> None:
    nameless = {**MI300X, "device": "0x740f", "product_name": "", "unique_id": ""}
    first, second = (found.gpu for found in amd_cards(machine(tmp_path, MI300X, nameless)))
    assert (first.name, first.uuid, first.index) == ("AMD Instinct MI210", "", 0), "the lower address"
    assert (second.name, second.uuid) == ("AMD Instinct MI300X OAM", "GPU-5a1bb2c3d4e5f607")
    assert (second.vendor, second.memory >> 30) == ("amd", 191)


def test_the_graphics_of_a_processor_and_cards_of_others_do_not_count(tmp_path: Path) -> None:
    integrated = {**MI300X, "mem_info_vram_total": str(512 << 20)}
    other = {"vendor": "0x8086", "device": "0x56c0"}
    assert amd_cards(machine(tmp_path, integrated, other)) == []


def test_without_the_compute_driver_nothing_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, MI300X)
    (tmp_path / "dev/kfd").unlink()
    assert amd_cards(root) == []
    assert amd_cards(str(tmp_path / "absent")) == []


def test_figures_are_read_and_what_is_missing_is_not_guessed(tmp_path: Path) -> None:
    bare = {name: MI300X[name] for name in ("vendor", "device", "mem_info_vram_total")}
    root = machine(tmp_path, bare, MI300X)
    assert amd_sample(0, root) == GpuSample(0, "AMD Instinct MI300X OAM", 87, 1610612736, 206141652992, 64.0, 512.0)
    assert amd_sample(1, root) == GpuSample(1, "AMD Instinct MI300X", None, None, 206141652992)


def test_a_machine_with_amd_cards_says_so(tmp_path: Path) -> None:
    if look().cards:
        return  # a machine with NVIDIA GPUs names those
    found = look({"HIP_VISIBLE_DEVICES": "1"}, machine(tmp_path, MI300X, MI300X))
    assert ([gpu.index for gpu in found.gpus], found.cards, found.problem) == ([1], 2, "")
