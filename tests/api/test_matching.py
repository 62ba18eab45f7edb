"""Whether a machine has the accelerators that were asked for."""

from __future__ import annotations

import pytest

from skyward.accelerators import CATALOG, Accelerator, resolve
from skyward.api.hardware import Found, Gpu
from skyward.api.matching import Verdict, compare, described, models_of

MIB = 1 << 20

# As drivers name them, with the MiB that they report.
PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": ("A100", 81920),
    "NVIDIA A100 80GB PCIe": ("A100", 81920),
    "A100-SXM4-40GB": ("A100", 40536),
    "NVIDIA A100-SXM-64GB": ("A100", 65536),
    "NVIDIA A800-SXM4-80GB": ("A800", 81920),
    "NVIDIA H100 80GB HBM3": ("H100", 81559),
    "NVIDIA H100 PCIe": ("H100", 81559),
    "NVIDIA H100 NVL": ("H100", 95830),
    "NVIDIA H200": ("H200", 143771),
    "NVIDIA H20": ("H20", 97871),
    "NVIDIA GH200 480GB": ("GH200", 97871),
    "NVIDIA B200": ("B200", 183359),
    "NVIDIA GB200": ("GB200", 189471),
    "Tesla T4": ("T4", 15360),
    "NVIDIA T4G": ("T4G", 15360),
    "Tesla V100-SXM2-16GB": ("V100", 16160),
    "Tesla V100-SXM3-32GB": ("V100", 32510),
    "Tesla P100-PCIE-16GB": ("P100", 16276),
    "Tesla K80": ("K80", 11441),
    "Tesla M60": ("M60", 7680),
    "NVIDIA L4": ("L4", 23034),
    "NVIDIA L40S": ("L40S", 46068),
    "NVIDIA L40": ("L40", 46068),
    "NVIDIA A10G": ("A10G", 23028),
    "NVIDIA A10": ("A10", 23028),
    "NVIDIA A40": ("A40", 46068),
    "NVIDIA A2": ("A2", 15356),
    "NVIDIA RTX A6000": ("RTX_A6000", 49140),
    "NVIDIA RTX 6000 Ada Generation": ("RTX_6000_ADA", 49140),
    "NVIDIA RTX 4000 SFF Ada Generation": ("RTX_4000_ADA", 20475),
    "Quadro RTX 6000": ("RTX_6000", 24576),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("RTX_PRO_6000", 97887),
    "NVIDIA GeForce RTX 4090": ("RTX_4090", 24564),
    "NVIDIA GeForce RTX 4070 Ti SUPER": ("RTX_4070_TI", 16376),
    "NVIDIA GeForce RTX 3080": ("RTX_3080", 10240),
    "NVIDIA GeForce GTX 1080 Ti": ("GTX_1080_TI", 11264),
    "NVIDIA TITAN V": ("TITAN_V", 12288),
    "NVIDIA TITAN RTX": ("TITAN_RTX", 24576),
    "AMD Instinct MI300X OAM": ("MI300X", 196592),
    "AMD Instinct MI210": ("MI210", 65520),
    "AMD INSTINCT MI250 (MCM) OAM AC MBA": ("MI250", 65520),
    "AMD Radeon RX 7900 XTX": ("RX_7900_XTX", 24560),
}


def asked(text: str) -> Accelerator:
    found = resolve(text)
    assert found is not None
    return found


def machine(*products: str, cards: int = 0) -> Found:
    gpus = tuple(Gpu(n, f"GPU-{n}", name, PRODUCTS[name][1] * MIB) for n, name in enumerate(products))
    return Found(gpus, cards or len(gpus))


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_card_is_what_its_driver_calls_it_and_nothing_else(product: str) -> None:
    model, _ = PRODUCTS[product]
    assert [found.name for found in models_of(product)] == [model]
    accepted = [
        name for name in (m.name for m in CATALOG.values()) if not compare(asked(name), machine(product)).refusal
    ]
    assert [name for name in accepted if not name.startswith("TPU")] == [model]


@pytest.mark.parametrize(
    ("requested", "products"),
    [
        ("A100", ["NVIDIA A100-SXM4-80GB"]),
        ("A100", ["A100-SXM4-40GB"]),
        ("A100-80GB", ["NVIDIA A100 80GB PCIe"]),
        ("A100-40GB", ["A100-SXM4-40GB"]),
        ("A100-80GB:8", ["NVIDIA A100-SXM4-80GB"] * 8),
        ("A100:2", ["NVIDIA A100-SXM4-80GB"] * 8),
        ("H100-94GB", ["NVIDIA H100 NVL"]),
        ("T4", ["Tesla T4", "NVIDIA GeForce RTX 4090"]),
        ("MI250:2", ["AMD INSTINCT MI250 (MCM) OAM AC MBA"] * 2),
    ],
)
def test_what_was_asked_for_is_accepted_without_a_word(requested: str, products: list[str]) -> None:
    assert compare(asked(requested), machine(*products)) == Verdict()


@pytest.mark.parametrize(
    ("requested", "products", "reason"),
    [
        ("A100", ["NVIDIA H200"], "has 1 x NVIDIA H200 (140 GiB), and that is no A100"),
        ("A100-80GB", ["A100-SXM4-40GB"], "has 1 x A100-SXM4-40GB (39 GiB), and 80GB of memory were asked for"),
        ("A100-40GB", ["NVIDIA A100-SXM4-80GB"], "has 1 x NVIDIA A100-SXM4-80GB (80 GiB), and 40GB of memory were"),
        ("A100:8", ["NVIDIA A100-SXM4-80GB"] * 4, "has 4 x NVIDIA A100-SXM4-80GB (80 GiB each)"),
        ("T4:2", ["Tesla T4", "NVIDIA L4"], "has 1 x Tesla T4 (15 GiB) and 1 x NVIDIA L4 (22 GiB), and that is no T4"),
        ("RTX_6000", ["NVIDIA RTX 6000 Ada Generation"], "that is no RTX_6000"),
        ("T4", [], "has no GPU"),
    ],
)
def test_what_is_something_else_or_too_few_is_refused_with_what_is_there(
    requested: str, products: list[str], reason: str
) -> None:
    verdict = compare(asked(requested), machine(*products))
    assert reason in verdict.refusal
    assert not verdict.doubt


def test_gpus_that_the_user_hides_are_named_as_the_reason() -> None:
    assert "hides all of its GPUs (8)" in compare(asked("H200"), Found((), 8)).refusal
    text = compare(asked("H200:8"), machine("NVIDIA H200", "NVIDIA H200", cards=8)).refusal
    assert text == "has 2 x NVIDIA H200 (140 GiB each) (of 8; CUDA_VISIBLE_DEVICES hides the others)"


def test_a_slice_or_a_virtual_part_is_not_the_whole() -> None:
    part = Gpu(0, "MIG-1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 << 30, card="GPU-1")
    assert "a MIG slice is not a whole A100" in compare(asked("A100"), Found((part,) * 7, 1)).refusal
    virtual = Gpu(0, "GPU-1", "GRID A100-10C", 10 << 30)
    assert "only a part of one A100" in compare(asked("A100"), Found((virtual,), 1)).refusal


def test_a_driver_that_does_not_answer_is_the_reason() -> None:
    verdict = compare(asked("H200"), Found(problem="the NVIDIA driver did not answer within 30 s"))
    assert verdict.refusal == "has no GPU that can be used: the NVIDIA driver did not answer within 30 s"


def test_what_cannot_be_compared_is_said_and_accepted() -> None:
    nameless = Found((Gpu(0, "GPU-1", "NVIDIA Graphics Device", 96 << 30),), 1)
    assert "whether it is a H200 is not checked" in compare(asked("H200"), nameless).doubt
    own = Accelerator("Nimbus9", "64GB", metadata={})
    assert "what you call Nimbus9" in compare(own, machine("NVIDIA H200")).doubt
    assert compare(own, Found((Gpu(0, "", "Acme Nimbus9", 64 << 30),), 1)) == Verdict()
    assert "64GB of memory" in compare(own, Found((Gpu(0, "", "Acme Nimbus9", 8 << 30),), 1)).refusal
    silent = Found((Gpu(0, "GPU-1", "NVIDIA A100-SXM4"),), 1)
    assert "how much memory" in compare(asked("A100-80GB"), silent).doubt
    assert compare(asked("A100"), silent) == Verdict()


def test_other_accelerators_are_counted_by_their_device_files() -> None:
    assert "has none of /dev/neuron*" in compare(asked("Trainium1"), Found()).refusal
    assert "has 1 of /dev/neuron*" in compare(asked("Trainium1:16"), Found(others={"neuron": 1})).refusal
    assert "whether they are Trainium1 is not checked" in compare(asked("Trainium1"), Found(others={"neuron": 1})).doubt
    assert "whether it has a TPU_V5E is not checked" in compare(asked("TPU_V5E"), Found()).doubt
    assert "has 4 of /dev/accel*" in compare(asked("TPU_V5E:4"), Found(others={"tpu": 4})).doubt


def test_gpus_are_described_by_kind() -> None:
    found = machine("Tesla T4", "Tesla T4", "NVIDIA L4").gpus
    assert described(found) == "2 x Tesla T4 (15 GiB each) and 1 x NVIDIA L4 (22 GiB)"
