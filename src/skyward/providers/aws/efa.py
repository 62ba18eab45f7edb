"""EFA, the network adapter that NCCL uses between machines: where it is used, and the interfaces that it takes.

One interface may have a public address only if it is the only one, so machines with such an address use one card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyward.machines.offers import CloudOffer

__all__ = ["EfaChoice", "interfaces"]


@dataclass(frozen=True)
class EfaChoice:
    """What decides on EFA, beside the type of a machine."""

    asked: bool | None = None
    """What the user said; None: where it helps and nothing is against it."""
    nodes: int = 1
    own_image: bool = False
    own_group: bool = False
    private: bool = False

    def why_not(self, offer: CloudOffer) -> str | None:
        """Why machines of this offer do not use EFA; None if they do."""
        if self.asked is False:
            return "efa=False"
        if not offer.efa_cards:
            return f"{offer.kind} has none"
        if self.nodes < 2 and not self.asked:
            return "there is one node"
        if not self.private and 0 not in offer.efa_cards:
            return (
                f"{offer.kind} has none on the card with the public address; use_private_ip=True uses its other cards"
            )
        if self.asked:
            return None
        if not offer.accelerator or offer.accelerator.startswith(("Trainium", "Inferentia")):
            return "it is used between NVIDIA GPUs only, unless efa=True"
        if self.own_image:
            return "it is not known whether the image of ami=... has its driver; efa=True says so"
        if self.own_group:
            return "the group would have to allow all traffic from and to itself; efa=True says that it does"
        return None

    def sentence(self, offer: CloudOffer) -> str | None:
        """What the user is told of EFA; None where nobody would ask."""
        if not offer.efa_cards or (self.nodes < 2 and not self.asked):
            return None
        why = self.why_not(offer)
        if why is not None:
            return f"EFA is not used: {why}"
        cards = len(offer.efa_cards)
        if self.private or cards == 1:
            return f"EFA is used between machines of one zone, {cards} network card{'' if cards == 1 else 's'} each"
        return (
            f"EFA is used between machines of one zone, on 1 of {cards} network cards, since only machines with one "
            "interface get a public address; use_private_ip=True uses all"
        )


def interfaces(offer: CloudOffer, subnet: str, group: str, private: bool, efa: bool) -> list[dict[str, Any]]:
    """The network interfaces of a machine, as RunInstances takes them."""
    common = {"SubnetId": subnet, "Groups": [group]}
    first: dict[str, Any] = {"DeviceIndex": 0, **common}
    if efa and 0 in offer.efa_cards:
        first["InterfaceType"] = "efa"
    others = [card for card in offer.efa_cards if card] if efa and private else []
    if not others:
        return [{**first, "AssociatePublicIpAddress": not private}]
    first |= {"NetworkCardIndex": 0, "DeleteOnTermination": True}
    return [
        first,
        *(
            {"DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa-only", "DeleteOnTermination": True}
            | common
            for card in others
        ),
    ]
