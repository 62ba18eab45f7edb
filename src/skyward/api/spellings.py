"""Names that are not in `skyward`, answered with those that are: what other tools call it, or what was nearly typed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["instead_of"]

_ELSEWHERE = {
    **dict.fromkeys(("remote", "function", "task", "delayed", "cls"), "@sky.compute"),
    **dict.fromkeys(("Pool", "Client", "App", "Executor", "init", "cluster"), "sky.ComputePool(...)"),
    **dict.fromkeys(("run", "call", "get", "wait"), "fn(x) >> pool"),
    **dict.fromkeys(("submit", "spawn"), "fn(x) > pool"),
    **dict.fromkeys(("map", "starmap"), "pool.map(fn, items)"),
    "broadcast": "fn(x) @ pool",
    "put": "pool.put(obj)",
    **dict.fromkeys(("rank", "local_rank", "world_size", "node", "nodes"), "sky.instance_info().rank and so on"),
    **dict.fromkeys(("Ssh", "hosts", "Hosts"), "sky.SSH(hosts=[...])"),
    **dict.fromkeys(("torch", "jax", "keras", "huggingface", "joblib", "sklearn"), "sky.plugins.{name}()"),
    **dict.fromkeys(("GCP", "Azure", "RunPod", "Lambda"), "sky.AWS(), or sky.SSH(hosts=[...]) for its machines"),
}


def instead_of(name: str, known: Sequence[str]) -> str:
    """What to write instead, as the end of a message; "" where nothing is near."""
    from difflib import get_close_matches

    if name in _ELSEWHERE:
        return f". Write {_ELSEWHERE[name].format(name=name)}"
    folded = {other.lower(): other for other in known}
    near = get_close_matches(name.lower(), list(folded), 1, 0.7)
    return f". Did you mean sky.{folded[near[0]]}?" if near else ""
