"""Who may say what in a greeting, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.transport.roles import CLIENT, node_role, refusal

CLIENTS: dict[str, Any] = {"session": "pool.1", "received": 0}
SHARES: dict[str, Any] = {"share": 1, "session": "any", "received": 0}
FETCHES: dict[str, Any] = {"fetch": "0" * 32}


@pytest.mark.parametrize(
    ("hello", "role"),
    [
        (CLIENTS, CLIENT),
        (CLIENTS, None),
        (SHARES, node_role(1)),
        (FETCHES, node_role(0)),
        (FETCHES, node_role(12)),
        ({"share": 4711}, None),
    ],
)
def test_each_role_may_speak_for_itself(hello: Any, role: str | None) -> None:
    assert refusal(hello, role, "pool.") is None


@pytest.mark.parametrize(
    ("hello", "role"),
    [
        (CLIENTS, node_role(1)),
        (CLIENTS, ""),
        (CLIENTS, "Client"),
        (SHARES, node_role(2)),
        (SHARES, node_role(11)),
        (SHARES, CLIENT),
        (SHARES, None),
        (FETCHES, CLIENT),
        (FETCHES, ""),
        (FETCHES, "scheduler"),
        ({"share": 1}, node_role(1)),
        ({"share": 1}, CLIENT),
    ],
)
def test_no_role_may_speak_for_another(hello: Any, role: str | None) -> None:
    """SEC-4, SEC-7."""
    assert "does not allow" in str(refusal(hello, role, "pool."))


@pytest.mark.parametrize("session", ["", "stranger", "poo", "2pool.1"])
@pytest.mark.parametrize("role", [CLIENT, None])
def test_a_session_of_another_pool_is_refused(session: str, role: str | None) -> None:
    assert "another pool" in str(refusal({"session": session, "received": 0}, role, "pool."))


@pytest.mark.parametrize(
    "hello",
    [
        None,
        [],
        "session",
        {},
        {"session": "pool.1"},
        {"session": 1, "received": 0},
        {"session": "pool.1", "received": "0"},
        {"session": "pool.1", "received": True},
        {"session": "pool.1", "received": 0, "fetch": "x"},
        {"session": "pool.1", "received": 0, "more": 1},
        {"fetch": 1},
        {"fetch": ["x"]},
        {"share": "1"},
        {"share": 1.0, "session": "x", "received": 0},
    ],
)
@pytest.mark.parametrize("role", [CLIENT, node_role(1), None])
def test_what_is_no_greeting_is_refused_whoever_says_it(hello: Any, role: str | None) -> None:
    assert "not a greeting" in str(refusal(hello, role, "pool."))
