"""Subnets, and the security group for SSH and the pool's own traffic."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_network
from typing import Any

from skyward.api.provider import Admission
from skyward.errors import CloudRefused, InvalidArgument, SkywardError
from skyward.machines.cloud import Terms, resource_name
from skyward.machines.ledger import Ledger
from skyward.providers.aws.api import Api, filters, specification

__all__ = [
    "ADDRESS_SERVICE",
    "FRESH",
    "OURS",
    "Subnet",
    "checked_cidr",
    "ensure_group",
    "own_address",
    "readmit",
    "ssh_rule",
    "subnets",
    "utc_now",
    "your_group",
]


FRESH = 30.0
"""Seconds in which a new resource may not be known everywhere."""
ADDRESS_SERVICE = "https://checkip.amazonaws.com"
_ASKING = 8.0


@dataclass(frozen=True)
class Subnet:
    id: str
    zone: str
    vpc: str
    public: bool = True


def subnets(api: Api, given: Sequence[str] = (), public: bool = True, demanded: bool = True) -> list[Subnet]:
    """Those named, or those of the default VPC. Without `public` addresses: refused if `demanded`, else marked."""
    requested: dict[str, Any] = {"SubnetIds": list(given)} if given else {"Filters": filters(default_for_az="true")}
    found = api.pages("ec2", "describe_subnets", "Subnets", **requested)
    if not found:
        raise InvalidArgument(
            f"there is no default VPC in {api.account.region}, so machines have no network. "
            'Name a subnet: sky.AWS(subnet_id="subnet-..."), or make one with `aws ec2 create-default-vpc`.'
        )
    vpcs = {item["VpcId"] for item in found}
    if len(vpcs) > 1:
        raise InvalidArgument(f"subnets of different networks were given ({', '.join(sorted(vpcs))}). Name one VPC's.")
    alone = [item["SubnetId"] for item in found if item.get("Ipv6Native")]
    if alone:
        raise InvalidArgument(
            f"subnet {', '.join(alone)} has IPv6 addresses only, and machines are reached, and reach each other, by "
            "IPv4. Nothing was created. Name a subnet with IPv4 addresses (dual-stack is fine)."
        )
    closed: set[str] = set()
    if given and public:
        closed = {
            item["SubnetId"]
            for item in found
            if not item.get("DefaultForAz") and not _leads_out(api, item["SubnetId"], item["VpcId"])
        }
    if closed and demanded:
        raise InvalidArgument(
            f"subnet {', '.join(sorted(closed))} has no route to an internet gateway, so its machines cannot be "
            "reached by a public address. Nothing was created. Name a public subnet; or, from inside the VPC or its "
            'VPN, say use_private_ip=True; or go through AWS: via="eice" (an EC2 Instance Connect endpoint), "ssm".'
        )
    return [
        Subnet(item["SubnetId"], item["AvailabilityZone"], item["VpcId"], item["SubnetId"] not in closed)
        for item in found
    ]


def checked_cidr(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value, strict=False))
    except ValueError as exc:
        raise InvalidArgument(
            f'ssh_from={value!r} is not an address. Write it like "203.0.113.7" or "203.0.113.0/24".'
        ) from exc


def own_address(private: bool = False, service: str = ADDRESS_SERVICE) -> str:
    import socket

    if private:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses a way out
            return checked_cidr(probe.getsockname()[0])
    from urllib.request import ProxyHandler, build_opener, getproxies

    # ssh knows nothing of proxies: their address counts only where nothing else leads out
    ways = [ProxyHandler({}), *([ProxyHandler()] if getproxies() else [])]
    errors: list[Exception] = []
    for way in ways:
        try:
            with build_opener(way).open(service, timeout=_ASKING) as answer:
                return _one_address(answer.read(64).decode("ascii").strip())
        except (OSError, ValueError) as exc:
            errors.append(exc)
    raise SkywardError(
        f"the public address of this computer could not be asked for at {service} ({errors[0]}); SSH is opened for "
        'that address only. Set it yourself: sky.AWS(ssh_from="203.0.113.7/32").'
    ) from errors[0]


def _one_address(text: str) -> str:
    address = ipaddress.ip_address(text)
    return f"{address}/{address.max_prefixlen}"


def ensure_group(
    api: Api, ledger: Ledger, terms: Terms, vpc: str, entrance: Sequence[dict[str, Any]], efa: bool = False
) -> str:
    known = ledger.history.left("security-group")
    if known:
        return known[0]
    name = resource_name(terms.pool)
    call = ledger.intent("security-group", region=api.account.region, name=name)
    try:
        group = api.call(
            "ec2",
            "create_security_group",
            GroupName=name,
            Description=f"skyward pool {terms.pool}"[:255],
            VpcId=vpc,
            TagSpecifications=specification(["security-group"], terms.tags),
        )["GroupId"]
    except CloudRefused as exc:
        if exc.kind != "duplicate":
            if not exc.unanswered:
                ledger.refused(call, "security-group", exc.code)
            raise
        group = _made_before(api, terms, vpc, exc)
    ledger.answer(call, "security-group", group, region=api.account.region)
    _let_in(api, group, entrance)
    if efa:
        _let_out(api, group)
    return group


def _made_before(api: Api, terms: Terms, vpc: str, refused: CloudRefused) -> str:
    # The answer to our first try was lost; what it made carries our tags, and lets nobody in yet.
    requested = filters(pool=terms.pool, owner=terms.owner[:256], group_name=resource_name(terms.pool), vpc_id=vpc)
    found = api.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=requested)
    found = [group for group in found if not group.get("IpPermissions")]
    if not found:
        raise refused
    return str(found[0]["GroupId"])


def _let_in(api: Api, group: str, entrance: Sequence[dict[str, Any]]) -> None:
    among = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    began = time.monotonic()
    while True:
        try:
            api.call("ec2", "authorize_security_group_ingress", GroupId=group, IpPermissions=[among, *entrance])
            return
        except CloudRefused as exc:
            if exc.kind == "duplicate":
                return
            if exc.kind != "missing" or time.monotonic() - began > FRESH:
                raise
        time.sleep(api.account.pace.poll)


def _let_out(api: Api, group: str) -> None:
    """For EFA a rule that allows all addresses does not count."""
    among = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    try:
        api.call("ec2", "authorize_security_group_egress", GroupId=group, IpPermissions=[among])
    except CloudRefused as exc:
        if exc.kind != "duplicate":
            raise


def _leads_out(api: Api, subnet: str, vpc: str) -> bool:
    own = filters(association_subnet_id=subnet)
    own[0]["Name"] = "association.subnet-id"
    main = filters(vpc_id=vpc, main="true")
    main[1]["Name"] = "association.main"
    for requested in (own, main):
        tables = api.pages("ec2", "describe_route_tables", "RouteTables", Filters=requested)
        if tables:
            routes: list[dict[str, Any]] = tables[0].get("Routes") or []
            return any(str(route.get("GatewayId", "")).startswith("igw-") for route in routes)
    return False


OURS = "the computer that opened the pool"
"""Marks our rules; the others are the user's."""
_KEPT = 2  # a computer between two networks, such as with a VPN that comes and goes, returns without asking


@dataclass(frozen=True)
class _Rule:
    cidr: str
    text: str


def readmit(api: Api, group: str, named: str | None, own: Callable[[], str], now: Callable[[], datetime]) -> Admission:
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
    try:
        which = f" ({own()})"
    except SkywardError:  # it is only said
        which = ""
    return Admission(
        allowed=f"They are in your own security group {group}: it must let in tcp port 22 from this computer{which}."
    )


def ssh_rule(cidr: str, text: str = OURS) -> dict[str, Any]:
    key, field = ("Ipv6Ranges", "CidrIpv6") if ":" in cidr else ("IpRanges", "CidrIp")
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, key: [{field: cidr, "Description": text}]}


def utc_now() -> datetime:
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
        "If ssh takes another way out (a VPN, a proxy, a second line), name that address: "
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
