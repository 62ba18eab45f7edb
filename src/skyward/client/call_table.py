"""The states of a call on the client, as a table: (state, event) -> (state, actions). `client/calls.py` applies it.

An event that a state has no row for changes nothing.
"""

from __future__ import annotations

__all__ = ["CALLS"]

Row = tuple[str, tuple[str, ...]]

_WITH_NODE: dict[str, Row] = {
    "recalled": ("waiting", ("queue again",)),
    "result": ("done", ("settle",)),
    "failure": ("done", ("fail",)),
    "doubtful failure": ("held", ("hold",)),
    "lost": ("waiting", ("count attempt", "queue again")),
    "lost for good": ("done", ("fail",)),
    "cancel": ("stopping", ("post cancel",)),
    "abandon": ("done", ("fail",)),
}

CALLS: dict[tuple[str, str], Row] = {
    # waits for a node that has room, or for results that it takes
    ("waiting", "send"): ("sent", ("post call",)),
    ("waiting", "cancel"): ("done", ("fail cancelled",)),
    ("waiting", "argument lost"): ("done", ("fail",)),
    ("waiting", "abandon"): ("done", ("fail",)),
    # a node has it
    **{("sent", event): row for event, row in _WITH_NODE.items()},
    ("sent", "recall"): ("recalling", ("post recall",)),
    # a node has it, and was asked to give it back if it has not begun
    **{("recalling", event): row for event, row in _WITH_NODE.items()},
    # a node has it, and was asked to end it
    ("stopping", "recalled"): ("done", ("fail cancelled",)),
    ("stopping", "result"): ("done", ("settle",)),
    ("stopping", "failure"): ("done", ("fail",)),
    ("stopping", "doubtful failure"): ("done", ("fail",)),
    ("stopping", "lost"): ("done", ("fail cancelled",)),
    ("stopping", "lost for good"): ("done", ("fail cancelled",)),
    ("stopping", "abandon"): ("done", ("fail",)),
    # a rank of a broadcast has failed; it may only have lost its peer, whose end is about to be told
    ("held", "release"): ("done", ("fail",)),
    ("held", "cancel"): ("done", ("fail",)),
    ("held", "abandon"): ("done", ("fail",)),
}
