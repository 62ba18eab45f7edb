"""The settings of `sky.Ray`, checked when it is made, and what they come to for Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from skyward.api.keywords import check_pairs
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument

__all__ = ["Strategy", "accelerator_types", "check_token", "demand", "parse_address", "parse_resources"]

Strategy = Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"]


def parse_address(given: object) -> str:
    """The address of a cluster; "auto" is what the variables of Ray's own programs say, if they say it."""
    if not isinstance(given, str) or not given.strip():
        raise InvalidArgument(f'address={given!r} is no address. Write "auto", "http://head:8265" or "head:6379".')
    given = given.strip()
    if given == "auto":
        known = (os.environ.get("RAY_API_SERVER_ADDRESS"), os.environ.get("RAY_ADDRESS"))
        given = next((found for found in known if found and found.startswith("http")), "auto")
    if given.startswith("ray://"):
        raise InvalidArgument(
            f"address={given!r} is that of Ray Client, which needs the same Ray and the same Python on both sides, and "
            'is not used here. Give the address of the Jobs API, where Ray\'s dashboard is: "http://<head>:8265".'
        )
    return given.rstrip("/")


def parse_resources(given: object) -> tuple[tuple[str, float], ...]:
    """What each node asks for, as pairs."""
    pairs = check_pairs("resources", given, '{"CPU": 4, "GPU": 1}')
    for name, amount in pairs:
        if not isinstance(name, str) or not isinstance(amount, int | float) or isinstance(amount, bool) or amount < 0:
            raise InvalidArgument(
                f'resources: {name!r}: {amount!r} cannot be asked of Ray. Write {{"CPU": 4, "GPU": 1}}.'
            )
    return tuple(sorted((str(name), float(amount)) for name, amount in pairs))


def accelerator_types(spec: Spec) -> list[str]:
    """The resources by which Ray's nodes say which accelerator they have, the exact one first."""
    if spec.accelerator is None:
        return []
    name, exact = spec.accelerator.name, f"{spec.accelerator.name}-{spec.accelerator.memory_gb}G"
    return [f"accelerator_type:{kind}" for kind in ((exact,) if spec.accelerator.exact else ()) + (name,)]


def demand(resources: Mapping[str, float], spec: Spec) -> dict[str, float]:
    """What a bundle asks for: what the user said in Ray's words, and for the rest what the spec says."""
    asked = dict(resources)
    if not asked or spec.vcpus is not None:
        asked.setdefault("CPU", spec.vcpus or 1)
    if spec.memory_gb is not None:
        asked.setdefault("memory", round(spec.memory_gb * 1e9))
    if spec.accelerator is not None and not {"GPU", "TPU", "neuron_cores"} & asked.keys():
        asked["GPU"] = spec.accelerator.count
    return asked


def check_token(token: object) -> None:
    """Refuses what cannot be a token, without showing it."""
    if token is not None and (
        not isinstance(token, str) or not token.isascii() or not token.isprintable() or (token and not token.strip())
    ):
        raise InvalidArgument("token= is no token. Leave it out, or give the cluster's.")
