"""What nodes say about shared collections by way of the client: each for its own processes."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.client.shared import ClientShared


def test_what_a_node_says_for_its_own_processes_is_passed_on() -> None:
    posted: list[Any] = []
    shared = ClientShared(lambda *each: posted.append(each), 3)
    shared._from_agent_share(1, 0.0, "1/token/runner", ["open", "rank 1", 1, 0], [])
    shared._from_agent_share(0, 0.0, "2/token/runner", ["answer", 1, "", "", None, 0], [])
    assert [to for to, _, _ in posted] == [0, 2]


@pytest.mark.parametrize("asker", ["client", "2/token/runner", "0/token/runner", "11/token/runner", ""])
def test_a_node_cannot_ask_for_the_client_or_for_another_node(asker: str) -> None:
    """SEC-4: it would take their locks, or stand at barriers for them."""
    posted: list[Any] = []
    shared = ClientShared(lambda *each: posted.append(each), 3)
    with pytest.raises(ValueError, match="no process of it"):
        shared._from_agent_share(1, 0.0, asker, ["open", "the client", None, 0], [])
    assert posted == []
