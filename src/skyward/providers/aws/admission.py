"""Who may log in to a pool's machines: this computer at its address of today, and who the user has named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_network
from typing import Any

from skyward.api.provider import Admission
from skyward.errors import CloudRefused, SkywardError
from skyward.providers.aws.api import Api

__all__ = ["OURS", "readmit", "ssh_rule", "utc_now", "your_group"]

OURS = "the computer that opened the pool"
"""What rules that we have made say of themselves; whatever else is in the group is the user's."""
_KEPT = 2  # a computer between two networks, such as with a VPN that comes and goes, returns without asking


@dataclass(frozen=True)
class _Rule:
    cidr: str
    text: str


def readmit(api: Api, group: str, named: str | None, own: Callable[[], str], now: Callable[[], datetime]) -> Admission:
    """Lets this computer in at its present address; where the user has `named` the addresses, nothing is changed."""
    rules = _rules(api, group)
    try:
        address = own()
    except SkywardError as exc:
        known = ", ".join(rule.cidr for rule in rules)
        return Admission(
            allowed=f"Security group {group} lets in ssh from {known}. Whether that is us is not known: {exc}"
        )
    if named is not None:
        return Admission(allowed=_named(group, named, address))
    if address in [rule.cidr for rule in rules]:
        return Admission(allowed=_allowed(group, address))
    text = f"{OURS}, since {now():%Y-%m-%dT%H:%M:%S.%fZ}"
    try:
        api.call("ec2", "authorize_security_group_ingress", GroupId=group, IpPermissions=[ssh_rule(address, text)])
    except CloudRefused as exc:
        if exc.kind != "duplicate":
            raise
    ours = sorted((rule for rule in rules if rule.text.startswith(OURS)), key=lambda rule: rule.text)
    gone, trouble = _removed(api, group, ours[: -(_KEPT - 1)])
    changed = f"this computer has another address: security group {group} now lets in ssh from {address}"
    changed += f", and no longer from {', '.join(gone)}" if gone else ""
    changed += f". An old rule is left in it: {trouble}" if trouble else "."
    return Admission(changed, _allowed(group, address))


def your_group(group: str, own: Callable[[], str]) -> Admission:
    """The same for a group of the user's own, which is not ours to change."""
    try:
        which = f" ({own()})"
    except SkywardError:  # it is only said
        which = ""
    return Admission(
        allowed=f"They stand in your own security group {group}: it must let in tcp port 22 from this computer{which}."
    )


def ssh_rule(cidr: str, text: str = OURS) -> dict[str, Any]:
    """A rule that lets in ssh from an address or a range of them."""
    key, field = ("Ipv6Ranges", "CidrIpv6") if ":" in cidr else ("IpRanges", "CidrIp")
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, key: [{field: cidr, "Description": text}]}


def utc_now() -> datetime:
    """The time, by which rules are ordered."""
    return datetime.now(UTC)


def _rules(api: Api, group: str) -> list[_Rule]:
    found = api.call("ec2", "describe_security_groups", GroupIds=[group])["SecurityGroups"]
    permissions: list[dict[str, Any]] = found[0].get("IpPermissions") or [] if found else []
    rules: list[_Rule] = []
    for permission in permissions:
        if permission.get("FromPort") == 22:
            for key, field in (("IpRanges", "CidrIp"), ("Ipv6Ranges", "CidrIpv6")):
                some: list[dict[str, str]] = permission.get(key) or []
                rules += [_Rule(one[field], one.get("Description", "")) for one in some]
    return rules


def _removed(api: Api, group: str, rules: Sequence[_Rule]) -> tuple[list[str], str]:
    """Removes rules; those that are gone then, and why others are not: the new address works all the same."""
    gone: list[str] = []
    trouble = ""
    for rule in rules:
        try:
            permission = ssh_rule(rule.cidr, rule.text)
            api.call("ec2", "revoke_security_group_ingress", GroupId=group, IpPermissions=[permission])
        except CloudRefused as exc:
            if exc.kind != "missing":
                trouble = trouble or str(exc)
                continue
        gone.append(rule.cidr)
    return gone, trouble


def _allowed(group: str, address: str) -> str:
    return (
        f"Security group {group} lets in ssh from {address} only, the address at which the world sees this computer. "
        "If ssh leaves by another way (a VPN, a proxy, a second line), name that one: "
        'sky.AWS(ssh_from="203.0.113.0/24").'
    )


def _named(group: str, named: str, address: str) -> str:
    ours, theirs = ip_network(address), ip_network(named)
    inside = ours.version == theirs.version and ours.network_address in theirs
    which = f"This computer is seen at {address}" + ("" if inside else ", which is not among them")
    return (
        f"Security group {group} lets in ssh from {named}, as ssh_from says. {which}. Name the addresses from which "
        'ssh comes: sky.AWS(ssh_from="203.0.113.0/24"); without it, the address is found and kept up to date.'
    )
