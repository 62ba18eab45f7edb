"""Shared collections: dicts, sets, counters, queues, locks, barriers and events that all ranks and the client see.

    body ── handles ── channel ──► server on node 0 ── state (pure)

Values are opaque bytes to the server.
"""

__all__: list[str] = []
