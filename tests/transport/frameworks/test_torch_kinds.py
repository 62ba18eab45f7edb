"""Tensors of every kind: equal on the other side, sharing what they shared, and never inside the pickle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.transport import blobs, tensors
from skyward.transport.blobs import Spill
from skyward.transport.payload import Packer, unpack
from tests.support.journeys import travel

SMALL = 4096
MANY = 1 << 20

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]

BYTEWISE = {torch.float8_e4m3fn, torch.float8_e5m2}  # torch compares no others of these


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are equal in value, type, shape and layout in memory."""
    return (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad) and bool(
        a.detach().reshape(-1).view(torch.uint8).equal(b.detach().reshape(-1).view(torch.uint8))
        if a.dtype in BYTEWISE
        else torch.equal(a, b)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_type_travels_beside_the_pickle(dtype: torch.dtype) -> None:
    sent = torch.randint(0, 2, (MANY, 2)).to(dtype)
    journey = travel(sent)
    assert same(journey.value, sent)
    assert journey.on_sockets < SMALL
    assert journey.blobs == 1


def layouts() -> dict[str, torch.Tensor]:
    cube = torch.randn(4, MANY // 4, 2)
    return {
        "transposed": cube.transpose(0, 2),
        "with gaps": cube[:, ::3],
        "a part": cube[1:2],
        "channels last": torch.randn(8, 3, 256, 256).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, MANY).expand(1000, MANY),
        "conjugate": torch.randn(MANY, dtype=torch.complex64).conj(),
        "negative": torch.randn(MANY, dtype=torch.complex64).conj().imag,
        "learnt": torch.randn(MANY, requires_grad=True),
    }


@pytest.mark.parametrize("name", layouts())
def test_a_tensor_keeps_its_layout(name: str) -> None:
    sent = layouts()[name]
    journey = travel(sent)
    assert same(journey.value, sent)
    assert (journey.value.is_conj(), journey.value.is_neg()) == (sent.is_conj(), sent.is_neg())
    assert journey.on_sockets < SMALL


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7,), (300,), (511,), (512,), (1000, 100)], ids=str)
def test_a_small_tensor_travels_too(shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape)
    got = travel([sent, "and", 3]).value[0]
    assert same(got, sent)
    assert got.data_ptr() % 64 == 0
    got.add_(1)
    got.resize_(2000)  # its memory is torch's own


def test_what_tensors_share_is_sent_once_and_shared_there() -> None:
    whole = torch.zeros(MANY)
    journey = travel(
        {"whole": whole, "part": whole[10:20], "turned": whole.view(1024, -1).T, "typed": whole.view(torch.int32)}
    )
    assert journey.blobs == 1
    got = journey.value
    got["part"].fill_(1.0)
    assert got["whole"].sum() == 10
    assert got["turned"].sum() == 10
    assert got["typed"].count_nonzero() == 10
    assert whole.sum() == 0


def test_the_same_tensor_twice_is_one_tensor_there() -> None:
    tensor = torch.zeros(MANY)
    first, second = travel((tensor, tensor)).value
    assert first is second


def test_a_part_of_a_large_tensor_brings_all_of_it() -> None:
    """As torch itself has it; whoever wants the part alone sends a clone."""
    whole = torch.zeros(4 * MANY)
    assert travel(whole[:10]).blobs == 1
    assert travel(whole[:10].clone()).blobs == 0


def test_a_tensor_that_arrived_can_be_changed_without_a_warning() -> None:
    sent = torch.zeros(MANY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = travel(sent).value
        got += 1
        got.numpy()[0] = 5
    assert got[0] == 5
    assert sent.sum() == 0


def test_a_module_comes_back_with_its_parameters_buffers_and_ties() -> None:
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 1024))
    module[2].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    module.eval()
    journey = travel(module)
    got = journey.value
    assert got[2].weight is got[0].weight
    assert type(got[0].weight) is torch.nn.Parameter
    assert [p.requires_grad for p in got.parameters()] == [p.requires_grad for p in module.parameters()]
    assert not got.training
    sample = torch.randn(3, 1024)
    assert torch.equal(got(sample), module(sample))
    assert journey.on_sockets < 40_000
    assert journey.blobs == 1
    got(sample).sum().backward()
    torch.optim.SGD(got.parameters(), 0.1).step()


def test_state_dicts_of_a_module_and_its_optimizer_come_back() -> None:
    module = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(2, 1024)).sum().backward()
    optimizer.step()
    journey = travel({"module": module.state_dict(), "optimizer": optimizer.state_dict()})
    assert journey.on_sockets < 40_000
    again = torch.nn.Linear(1024, 1024)
    again.load_state_dict(journey.value["module"])
    torch.optim.Adam(again.parameters()).load_state_dict(journey.value["optimizer"])
    assert all(same(a.data, b.data) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_many_small_parameters_go_together() -> None:
    module = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(100))
    journey = travel(module)
    assert journey.on_sockets < 200_000
    assert journey.in_band < 200_000
    assert all(same(a, b) for a, b in zip(module.parameters(), journey.value.parameters(), strict=True))


class Named(torch.Tensor):
    """A subclass, which has its own way."""


@pytest.mark.filterwarnings("ignore")  # several of these are prototypes, torch says
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(1000).to_sparse(),
        lambda: torch.eye(1000).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.randn(MANY), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_channel(torch.randn(8, MANY // 8), torch.rand(8), torch.zeros(8), 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.randn(1000, 30), torch.randn(2000, 30)]),
        lambda: torch.randn(MANY).as_subclass(Named),
        lambda: torch.nn.Parameter(torch.randn(MANY), requires_grad=False),
        lambda: torch.nn.Buffer(torch.randn(MANY)),
    ],
    ids=["sparse", "csr", "quantized", "per channel", "nested", "subclass", "parameter", "buffer"],
)
def test_a_special_tensor_travels_as_torch_has_it(make: Any) -> None:
    sent = make()
    got = travel(sent).value
    assert type(got) is type(sent)
    assert (got.layout, got.dtype, got.is_quantized) == (sent.layout, sent.dtype, sent.is_quantized)
    if sent.is_nested:
        pairs = zip(sent.unbind(), got.unbind(), strict=True)
    elif sent.is_quantized:
        pairs = [(sent.dequantize(), got.dequantize())]
    else:
        pairs = [(sent.to_dense(), got.to_dense())]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_tensor_keeps_the_attributes_that_were_set_on_it() -> None:
    sent = torch.zeros(MANY)
    sent.note = "mine"  # type: ignore[attr-defined]
    assert travel(sent).value.note == "mine"


def test_a_tensor_without_memory_travels_as_such() -> None:
    sent = torch.empty(1 << 40, device="meta")
    got = travel(sent).value
    assert got.device.type == "meta"
    assert got.shape == sent.shape


def test_storages_travel_by_themselves() -> None:
    sent = torch.arange(MANY).untyped_storage()
    got = travel(sent).value
    assert type(got) is torch.UntypedStorage
    assert bytes(got[:16]) == bytes(sent[:16])


def test_what_lay_on_a_gpu_comes_to_the_cpu_where_there_is_none() -> None:
    """The reducer's answer for a tensor of such a device, made by hand: here is none."""
    sent = torch.randn(MANY)
    make, (data, device) = tensors._reduce_storage(sent.untyped_storage())
    assert device == "cpu"
    for name in ("cuda:0", "cuda:7", "mps", "xpu:1"):
        got = torch.empty(0).set_(make(bytearray(data), name))
        assert got.device.type == "cpu"
        assert torch.equal(got, sent)


def test_a_tensor_inside_an_inner_pickle_comes_to_the_cpu_too() -> None:
    """What was pickled by torch's own means on a node with a GPU says `cuda`, and torch refuses it here."""
    _, (data,) = torch.arange(5)._typed_storage().__reduce__()
    assert data.count(b"X\x03\x00\x00\x00cpu") == 1
    on_gpu = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")

    class Stored:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (on_gpu,)

    got = travel(Stored()).value
    assert got._untyped_storage.device.type == "cpu"


def test_what_leaves_a_device_is_copied_into_the_blob_itself(tmp_path: Path) -> None:
    """On this computer the device is the CPU, and the copy the same one as from a GPU."""
    sent = torch.randn(MANY)
    with Spill(str(tmp_path)) as spill:
        moved = spill.store([tensors._on_host(torch, sent.view(torch.uint8))])
    assert len(list(tmp_path.iterdir())) == 1
    assert bytes(blobs.read(moved["0"])) == sent.numpy().tobytes()


def test_a_tensor_that_was_sent_can_be_resized_afterwards() -> None:
    sent = torch.zeros(MANY)
    travel(sent)
    sent.resize_(2 * MANY)


def test_what_was_packed_is_not_bound_to_where_it_was_packed() -> None:
    """Pieces that nothing maps: a plain list of bytes is enough to unpack them."""
    head, buffers = Packer().pack({"t": torch.arange(MANY)}, "value")
    got = unpack(head, [bytes(b) for b in buffers])
    assert torch.equal(got["t"], torch.arange(MANY))


def test_a_plain_tensor_needs_no_care_of_cloudpickle() -> None:
    assert Packer().pack_simple(({"x": torch.zeros(256), "y": [torch.zeros(4, 4).T]}, {})) is not None
    assert Packer().pack_simple(torch.zeros(4, requires_grad=True)) is None
