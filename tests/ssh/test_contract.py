"""Hosts that are reached with ssh keep the contract of all pools."""

from __future__ import annotations

from tests.contracts.pool import PoolContract


class TestSsh(PoolContract): ...
