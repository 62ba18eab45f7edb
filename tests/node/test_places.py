"""What differs between the runners of a node."""

from __future__ import annotations

from typing import Any

from skyward.api.info import InstanceInfo, Peer
from skyward.node.agent import info_at, variables

INFO = InstanceInfo(
    node=1,
    total_nodes=2,
    workers_per_node=2,
    head_addr="10.0.0.1",
    head_port=1,
    job_id="p",
    peers=(Peer(0, "10.0.0.1"), Peer(1, "10.0.0.2")),
)
SETTINGS: dict[str, Any] = {
    "info": INFO.to_json(),
    "env": {"A": "all", "GPU": "0,1"},
    "places": [{"GPU": "0"}, {"GPU": "1"}],
}


def test_each_runner_is_told_its_own_rank() -> None:
    assert info_at(SETTINGS, 0) == INFO.to_json()
    second = InstanceInfo.from_json(info_at(SETTINGS, 1))
    assert (second.rank, second.local_rank, second.node) == (3, 1, 1)


def test_what_is_said_for_a_place_counts_before_what_is_said_for_all() -> None:
    found = [variables(SETTINGS, place) for place in range(2)]
    assert [(env["A"], env["GPU"]) for env in found] == [("all", "0"), ("all", "1")]
    assert [InstanceInfo.from_json(env["COMPUTE_POOL"]).rank for env in found] == [2, 3]
