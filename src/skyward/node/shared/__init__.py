"""Shared collections: dicts, sets, counters, queues, locks, barriers and events that all ranks and the client see.

      body ── handles ── channel ──► server on node 0 ── state (pure)

`state.py` has no clock, socket or thread. Values are opaque bytes to it: users' processes pickle and unpickle.
"""

__all__: list[str] = []
