"""Shared collections: dicts, sets, counters, queues, locks, barriers and events that all ranks and the client see.

    body ── handles ── channel ──► server on node 0 ── state (pure)

`state.py` and the kinds of collections decide, and know no clock, socket or thread. Values are bytes to them: what a
user has put in is pickled and unpickled by whoever asks.
"""

__all__: list[str] = []
