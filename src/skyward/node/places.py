"""What differs between the runners of a node: each has a place there, which is its local rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skyward.api.info import VARIABLE, InstanceInfo

__all__ = ["info_at", "variables"]


def variables(settings: dict[str, Any], place: int) -> dict[str, str]:
    """The environment variables of the runner at a place, as the client's `setup` says them."""
    return {**settings["env"], **settings["places"][place], VARIABLE: info_at(settings, place)}


def info_at(settings: dict[str, Any], place: int) -> str:
    """The text of COMPUTE_POOL for the runner at a place."""
    info: str = settings["info"]
    return info if place == 0 else replace(InstanceInfo.from_json(info), worker=place).to_json()
