"""PyTorch over ranks: several processes on each of several nodes, as torchrun starts them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from skyward.plugins import _ranks, _torch_gpus
from tests.support.ranks import HOST, rank


@pytest.fixture
def stores() -> list[Any]:
    """Two ends of one store of torch."""
    TCPStore = pytest.importorskip("torch.distributed").TCPStore
    with socket.create_server((HOST, 0)) as found:
        port = found.getsockname()[1]
    limit = timedelta(seconds=60)
    first = TCPStore(HOST, port, is_master=True, wait_for_workers=False, timeout=limit)
    return [first, TCPStore(HOST, port, timeout=limit)]


@pytest.mark.parametrize(
    ("finds", "backend", "said"),
    [
        ((True, True), "nccl", ""),
        ((True, False), "gloo", "torch finds no GPU on rank 1 (on node 0): the torch group uses gloo.\n"),
        ((False, False), "gloo", ""),
    ],
)
def test_all_ranks_agree_on_what_torch_finds(
    finds: tuple[bool, bool], backend: str, said: str, stores: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _ranks._said.clear()

    def voted(number: int) -> str:
        return _torch_gpus._voted_backend(rank(number, node_gpus=("0", "1")), stores[number], finds[number])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(voted, range(2))) == [backend] * 2
    assert capsys.readouterr().err == said
