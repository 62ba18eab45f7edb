"""The certificates of a pool on other machines: the client's, and one for each node."""

from __future__ import annotations

import ssl
import time

from skyward.transport.certificates import Authority, context
from skyward.transport.roles import CLIENT, node_role

__all__ = ["PoolCertificates"]


class PoolCertificates:
    """Issues certificates of one pool."""

    def __init__(self, pool: str, ttl: float) -> None:
        self.authority = Authority(pool, ttl)
        self._tls: tuple[ssl.SSLContext, float] | None = None  # with the time when it is made again
        self.client()

    def client(self) -> ssl.SSLContext:
        """TLS with the client's certificate; machines can be replaced, so a pool may live longer than one is valid."""
        now = time.monotonic()
        if self._tls is None or now > self._tls[1]:
            identity = self.authority.issue(CLIENT)
            self._tls = context(identity, server=False), now + self.authority.lifetime / 2
        return self._tls[0]

    def of_node(self, node: int) -> dict[str, str]:
        """What a node's agent shows to others, and whom it trusts."""
        return vars(self.authority.issue(node_role(node)))
