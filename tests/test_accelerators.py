"""The catalogue of accelerators (D6, S1-07, T2)."""

from __future__ import annotations

import pickle

import pytest

from skyward import accelerators
from skyward.accelerators import A100, CATALOG, Accelerator, Model, Trainium2, resolve
from skyward.errors import InvalidArgument


def test_a_name_is_enough_to_know_memory_and_cuda() -> None:
    """D6: look-up by name fills memory and a CUDA range; T2: a string is as good as an object."""
    found = resolve("A100")
    assert found == Accelerator("A100") == A100()
    assert found is not None
    assert (found.memory, found.memory_gb, found.count) == ("80GB", 80, 1)
    assert found.supports_cuda
    assert found.metadata == {"cuda": {"min": "11.0", "max": "13.2"}}


@pytest.mark.parametrize(
    ("text", "name", "memory", "count"),
    [
        ("a100:8", "A100", "80GB", 8),
        ("A100-40GB", "A100", "40GB", 1),
        ("a100 40gb : 2", "A100", "40GB", 2),
        ("rtx 4090", "RTX_4090", "24GB", 1),
        ("RTX-4090:4", "RTX_4090", "24GB", 4),
        ("tpu v5e", "TPU_V5E", "16GB", 1),
        ("trainium2:16", "Trainium2", "96GB", 16),
    ],
)
def test_strings_are_read_in_every_usual_spelling(text: str, name: str, memory: str, count: int) -> None:
    """S1-07."""
    found = resolve(text)
    assert found is not None
    assert (found.name, found.memory, found.count) == (name, memory, count)


@pytest.mark.parametrize(
    ("text", "exact", "variants", "words"),
    [
        ("A100", False, (80, 40), "1 x A100 (80GB or 40GB each)"),
        ("A100:8", False, (80, 40), "8 x A100 (80GB or 40GB each)"),
        ("A100-80GB", True, (80,), "1 x A100 (80GB each)"),
        ("A100-40GB:2", True, (40,), "2 x A100 (40GB each)"),
        ("T4", False, (16,), "1 x T4 (16GB each)"),
    ],
)
def test_without_memory_every_variant_will_do(text: str, exact: bool, variants: tuple[int, ...], words: str) -> None:
    found = resolve(text)
    assert found is not None
    assert (found.exact, found.variants, found.described()) == (exact, variants, words)


def test_wishes_differ_where_variants_do() -> None:
    assert A100() != A100(memory="80GB")
    assert resolve("T4") == resolve("T4-16GB"), "there is only one"
    assert Accelerator("Nimbus9", metadata={}).described() == "1 x Nimbus9"
    assert Accelerator("Nimbus9", "64GB", metadata={}).variants == (64,)


def test_none_stays_none_and_an_accelerator_stays_itself() -> None:
    chosen = A100(count=2)
    assert resolve(None) is None
    assert resolve(chosen) is chosen
    assert resolve(A100) == A100()


def test_factories_take_count_and_memory() -> None:
    """D6."""
    assert A100(count=8, memory="40GB") == resolve("A100-40GB:8")
    assert A100(8) == A100(count=8)
    assert A100(memory="40") == A100(memory="40 GiB")


@pytest.mark.parametrize("text", ["MI300X", "TPU_V6E", "Trainium1", "Inferentia2"])
def test_what_is_not_from_nvidia_has_no_cuda(text: str) -> None:
    """S4-08."""
    found = resolve(text)
    assert found is not None
    assert not found.supports_cuda
    assert found.metadata is not None
    assert "cuda" not in found.metadata


def test_an_unknown_name_lists_near_ones() -> None:
    """D6: unknown names raise ValueError."""
    with pytest.raises(InvalidArgument, match=r"'H10O'.*near ones: H100") as caught:
        resolve("H10O")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(InvalidArgument, match="A100"):
        Accelerator("A1000")


def test_a_name_like_no_other_lists_them_all() -> None:
    with pytest.raises(InvalidArgument, match=r"known ones: .*A100.*Inferentia2"):
        resolve("qqqqqqqq")


def test_memory_that_the_model_does_not_have_lists_what_it_has() -> None:
    with pytest.raises(InvalidArgument, match="80GB or 40GB"):
        resolve("A100-30GB")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        A100(memory="lots")


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_the_count_is_a_whole_number_from_one_on(count: object) -> None:
    with pytest.raises(InvalidArgument, match="count="):
        Accelerator("A100", count=count)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["A100:", "A100:x", "A100:2:3", ""])
def test_a_text_that_cannot_be_read_is_an_error_in_words(value: str) -> None:
    with pytest.raises(InvalidArgument):
        resolve(value)


def test_something_else_than_a_name_is_an_error_in_words() -> None:
    with pytest.raises(InvalidArgument, match="has type int"):
        resolve(8)  # type: ignore[arg-type]


def test_one_that_is_not_in_the_catalogue_can_be_described() -> None:
    own = Accelerator("Nimbus9", memory="512gb", count=4, metadata={"cuda": {"min": "13.0", "max": "13.2"}})
    assert own.supports_cuda
    assert own.memory == "512GB"


def test_it_is_a_value() -> None:
    assert len({A100(), A100(), A100(2)}) == 2
    assert pickle.loads(pickle.dumps(Trainium2(4))) == Trainium2(4)
    with pytest.raises(AttributeError):
        A100().count = 3  # type: ignore[misc]


def test_every_line_of_the_catalogue_is_public_and_sound() -> None:
    assert {model.name for model in CATALOG.values()} <= set(accelerators.__all__)
    for model in CATALOG.values():
        assert getattr(accelerators, model.name) is model
        assert resolve(model.name.lower()) == model()
        for size in model.sizes:
            assert model(memory=f"{size}GB").memory_gb == size
        if model.cuda:
            low, high = (tuple(map(int, version.split("."))) for version in model.cuda)
            assert low < high


def test_the_named_families_are_there() -> None:
    """NVIDIA data-centre and consumer, AMD, TPU, Trainium and Inferentia."""
    wanted = "A100 H100 H200 B200 L4 L40S T4 V100 A10 A10G RTX_4090 MI300X TPU_V2 TPU_V3 TPU_V4 TPU_V5E TPU_V5P TPU_V6E"
    for name in [*wanted.split(), "Trainium1", "Trainium2", "Inferentia1", "Inferentia2"]:
        assert isinstance(getattr(accelerators, name), Model)
