"""Places in pools that do not exist, for tests of what plugins make of them."""

from __future__ import annotations

from typing import Any

from skyward.api.info import InstanceInfo, NetworkInfo, Peer

__all__ = ["HOST", "rank"]

HOST = "127.0.0.1"


def rank(number: int, ranks: int = 2, nodes: int = 1, **other: Any) -> InstanceInfo:
    """Rank `number` of a pool whose `nodes` have `ranks` each."""
    return InstanceInfo(
        node=number // ranks,
        worker=number % ranks,
        total_nodes=nodes,
        workers_per_node=ranks,
        head_addr=HOST,
        head_port=4999,
        job_id="test",
        peers=tuple(Peer(node, HOST) for node in range(nodes)),
        network=NetworkInfo("lo"),
        **other,
    )
