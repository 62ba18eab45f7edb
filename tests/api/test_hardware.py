"""Which GPUs and MIG slices a program may use, as CUDA and ROCm count them."""

from __future__ import annotations

import pytest

from skyward.api.hardware import Card, Gpu, seen_by_one_process, visible

GB = 10**9


def whole(index: int, uuid: str, name: str = "NVIDIA A100-SXM4-80GB") -> Card:
    return Card(Gpu(index, uuid, name, 80 * GB))


def sliced(index: int, uuid: str, slices: int) -> Card:
    name = "NVIDIA A100-SXM4-40GB"
    parts = (Gpu(index, f"MIG-{index}{n}", f"{name} MIG 1g.5gb", 5 * GB, card=uuid) for n in range(slices))
    return Card(Gpu(index, uuid, name, 40 * GB), True, tuple(parts))


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ["GPU-aa00", "GPU-bb00", "GPU-bc00", "GPU-cc00"]),
        ("", []),
        ("-1", []),
        ("0", ["GPU-aa00"]),
        ("0,2", ["GPU-aa00", "GPU-bc00"]),
        (" 3 , 1 ", ["GPU-cc00", "GPU-bb00"]),
        ("0,9,1", ["GPU-aa00"]),
        ("0,0", []),
        ("GPU-bb", ["GPU-bb00"]),
        ("GPU-b", []),
        ("GPU-aa,GPU-cc", ["GPU-aa00", "GPU-cc00"]),
        ("none", []),
    ],
)
def test_visible_devices_are_those_that_cuda_shows(value: str | None, uuids: list[str]) -> None:
    """S1-42."""
    cards = [whole(n, uuid) for n, uuid in enumerate(["GPU-aa00", "GPU-bb00", "GPU-bc00", "GPU-cc00"])]
    found = visible(cards, {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.uuid for gpu in found] == uuids
    assert seen_by_one_process(found) == len(uuids)


@pytest.mark.parametrize(
    ("value", "count"),
    [(None, 7), ("0", 7), ("MIG-03", 1), ("MIG-03,MIG-04", 2), ("MIG-03,MIG-03", 0), ("MIG-99", 0), ("", 0)],
)
def test_every_slice_of_a_card_can_be_given_to_a_process_and_each_sees_one(value: str | None, count: int) -> None:
    found = visible([sliced(0, "GPU-aa", 7)], {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert len(found) == count
    assert seen_by_one_process(found) == min(count, 1)
    assert all(gpu.is_slice and gpu.memory == 5 * GB for gpu in found)


def test_whole_cards_and_slices_are_counted_side_by_side() -> None:
    cards = [whole(0, "GPU-aa"), sliced(1, "GPU-bb", 3), Card(Gpu(2, "GPU-cc", "NVIDIA A100-SXM4-40GB"), True)]
    assert [gpu.index for gpu in visible(cards, {})] == [0, 1, 1, 1], "a card with MIG on and no slice gives nothing"
    assert [gpu.index for gpu in visible(cards, {"CUDA_VISIBLE_DEVICES": "0"})] == [0]


def test_a_slice_that_only_the_user_knows_counts_as_one() -> None:
    (found,) = visible([whole(0, "GPU-aa")], {"CUDA_VISIBLE_DEVICES": "MIG-0c1d"})
    assert (found.uuid, found.is_slice) == ("MIG-0c1d", True)


@pytest.mark.parametrize(
    ("environ", "uuids"),
    [
        ({}, ["GPU-1", "GPU-2", "GPU-3"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, ["GPU-2", "GPU-3"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["GPU-3"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"}, ["GPU-1"]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ["GPU-3"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-2"}, ["GPU-2"]),
    ],
)
def test_rocm_has_variables_of_its_own(environ: dict[str, str], uuids: list[str]) -> None:
    cards = [Card(Gpu(n - 1, f"GPU-{n}", "AMD Instinct MI300X", 192 * GB, "amd")) for n in (1, 2, 3)]
    assert [gpu.uuid for gpu in visible(cards, environ)] == uuids
