"""What the user is told when nodes have other accelerators than were asked for, or when that cannot be checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyward.accelerators import Accelerator
from skyward.api.hardware import Found
from skyward.api.matching import compare, models_of
from skyward.errors import AcceleratorMismatch

__all__ = ["doubts", "refusal"]


def refusal(
    requested: Accelerator | None, name: str, node: int, greeting: Mapping[str, Any]
) -> AcceleratorMismatch | None:
    """The error for a node whose machine, `name`, has something else; None if it has what was asked for."""
    if requested is None:
        return None
    found = Found.of(greeting)
    reason = compare(requested, found).refusal
    if not reason:
        return None
    text = f"{name} {reason}; {requested.described()} was asked for. {_advice(found)}"
    return AcceleratorMismatch("accelerator", text, node)


def doubts(requested: Accelerator | None, greetings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is to be said of machines, by name: what could not be checked, and GPUs that do not answer."""
    found = {name: Found.of(greeting) for name, greeting in greetings.items()}
    if requested is None:
        broken = {name: one.problem for name, one in found.items() if one.problem}
        return [f"{_all(names)}: {text}. Programs cannot use GPUs there." for text, names in _grouped(broken).items()]
    unsure = {name: compare(requested, one).doubt for name, one in found.items()}
    return [f"{_all(names)} {text}." for text, names in _grouped(unsure).items() if text]


def _advice(found: Found) -> str:
    models = models_of(found.gpus[0].name) if found.gpus and not found.gpus[0].is_slice else []
    if not models:
        return "Leave `accelerator` out to run on what is there, or use machines that have it."
    count = f":{len(found.gpus)}" if len(found.gpus) > 1 else ""
    return f'Ask for what is there, accelerator="{models[0].name}{count}", or use other machines.'


def _grouped(texts: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return names


def _all(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
