"""Which role may send which greeting: the client speaks for itself, and a node for itself.

On another machine the certificate names the role. On this computer the kernel says that the peer belongs to the same
user, and its role is None.
"""

from __future__ import annotations

from typing import Any, cast

__all__ = ["CLIENT", "node_role", "refusal"]

CLIENT = "client"

_KINDS = {
    **dict.fromkeys(("fetch", "session", "by"), str),
    **dict.fromkeys(("share", "received", "epoch", "terms", "serial"), int),
    **dict.fromkeys(("left", "drain"), float),
    "end": bool,
}


def node_role(node: int) -> str:
    return f"node-{node}"


def refusal(hello: Any, role: str | None, session: str) -> str | None:
    """None if the greeting is accepted. `session` is how the names of this pool's sessions begin."""
    greeting = cast("dict[str, Any]", hello) if isinstance(hello, dict) else {}
    if not all(type(value) is _KINDS.get(name) for name, value in greeting.items()):
        greeting = {}
    match sorted(greeting):
        case ["fetch"]:  # a blob, for another node
            allowed = role is None or role.startswith("node-")
        case ["received", "session", "share"]:  # shared collections, for the runners of a node on another machine
            allowed = role == node_role(greeting["share"])
        case ["share"]:  # shared collections, for a runner of this computer
            allowed = role is None
        case ["by", "drain", "end", "left", "serial", "terms"]:  # of a run's steward: until when the node lives
            allowed = role in (None, CLIENT)
        case ["received", "session"] | ["epoch", "received", "session"]:
            allowed = role in (None, CLIENT)
            if allowed and not greeting["session"].startswith(session):
                return "the session is none of the pool that this node belongs to: this is the client of another pool"
        case _:
            return "this is not a greeting: the peer has another version of Skyward, or none"
    return None if allowed else f"the certificate of {role or 'nobody'!r} does not allow this greeting"
