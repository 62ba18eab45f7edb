"""What a test cloud does otherwise than moto: client tokens, room, late sight, states, placement groups, prices.

Methods are named after the actions that they answer.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from tests.support.cloud import pictures, shop
from tests.support.cloud.machines import Instance, Machines
from tests.support.cloud.pictures import Picture
from tests.support.cloud.reserved import Reserved
from tests.support.cloud.wire import (
    Answer,
    Request,
    edited,
    error,
    filters,
    listed,
    rendered,
    tag_specifications,
    xml,
)

__all__ = ["REQUIRED_TAGS", "Ec2"]

REQUIRED_TAGS = ("skyward:pool", "skyward:owner", "skyward:expires-at", "skyward:version")
_CREATES = {
    "RunInstances": ("instance", "volume"),
    "CreateSecurityGroup": ("security-group",),
    "ImportKeyPair": ("key-pair",),
    "CreatePlacementGroup": ("placement-group",),
    "CreateLaunchTemplate": ("launch-template",),
    "CreateFleet": ("fleet", "instance"),
}
_UNKNOWN = ("IamInstanceProfile.", "CapacityReservationSpecification.")  # to moto
Forward = Callable[[Request], Answer]


@dataclass
class Ec2:
    """Answers that differ from moto's; everything else is passed on with `forward`."""

    forward: Forward
    zone_of: Callable[[str, str], str]
    """Region and subnet -> zone."""
    machines: Machines = field(default_factory=Machines)
    spot: Callable[[str, str], float | None] = lambda kind, zone: None
    demand: Callable[[str, str], Mapping[str, float]] = lambda kind, region: {}
    tokens: dict[str, tuple[dict[str, str], Answer]] = field(default_factory=dict[str, tuple[dict[str, str], Answer]])
    keys: dict[str, str] = field(default_factory=dict[str, str])
    placements: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict[tuple[str, str], dict[str, str]])
    used: dict[str, str] = field(default_factory=dict[str, str])
    """Instance -> the placement group in which it stands."""
    reserved: Reserved = field(default_factory=Reserved)
    images: dict[str, Picture] = field(default_factory=dict[str, Picture])
    """Images that were made of machines, by id."""
    quotas: Mapping[str, float] = field(default_factory=dict[str, float])
    endpoints: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """EC2 Instance Connect endpoints: VPC and security group of each."""
    kept: dict[bytes, Answer] = field(default_factory=dict[bytes, Answer])

    def answer(self, request: Request) -> Answer:
        """The answer to a request."""
        missing = _untagged(request)
        if missing:
            return error("ec2", "UntaggedResource", f"{request.action} without tags {', '.join(missing)}")
        if request.service == "ec2" and request.params.get("DryRun") == "true":
            return error("ec2", "DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
        own = getattr(self, f"_{request.action}", None)
        return own(request) if own is not None else self.forward(request)

    def _RunInstances(self, request: Request) -> Answer:
        token = request.params.get("ClientToken", "")
        if token in self.tokens:
            params, answer = self.tokens[token]
            if params == request.params:
                return answer
            return error("ec2", "IdempotentParameterMismatch", "the token was used with other parameters")
        answer = self._launched(request)
        if token and answer.status == 200:
            self.tokens[token] = (dict(request.params), answer)
        return answer

    def _launched(self, request: Request) -> Answer:
        params = request.params
        if params["ImageId"] not in (*shop.IMAGES.values(), *shop.OTHERS, *self.images):
            return error("ec2", "InvalidAMIID.NotFound", f"no image {params['ImageId']}")
        if params.get("KeyName", "") not in self.keys:
            return error("ec2", "InvalidKeyPair.NotFound", f"no key {params.get('KeyName')}")
        zone = self.zone_of(request.region, params["NetworkInterface.1.SubnetId"])
        market = params.get("InstanceMarketOptions.MarketType", "on-demand")
        refused = self.reserved.refusal(params, zone, market)
        if refused:
            return error("ec2", *refused)
        room = self.machines.room(zone, params["InstanceType"], market, int(params["MaxCount"]))
        if room < int(params["MinCount"]):
            text = f"no room for {params['MinCount']} x {params['InstanceType']} ({market}) in {zone}"
            return error("ec2", "InsufficientInstanceCapacity", text, 500)
        # roles are another service, of which nothing exists here
        known = {key: value for key, value in params.items() if not key.startswith(_UNKNOWN)}
        if market == "capacity-block":
            known.pop("InstanceMarketOptions.MarketType")
        counts = {"MinCount": str(room), "MaxCount": str(room)}
        given = Request(request.service, request.action, request.region, {**known, **counts})
        answer = self.forward(given)
        if answer.status == 200:
            for item in self._items(answer):
                self._register(item, request, zone, market)
            answer = self._overlaid(answer)
        return answer

    def _register(self, item: Any, request: Request, zone: str, market: str) -> None:
        params, now, times = request.params, time.time(), self.machines.times
        groups = listed(params, "NetworkInterface.1.SecurityGroupId")
        id = item.findtext("instanceId")
        instance = Instance(
            id=id,
            region=request.region,
            zone=zone,
            kind=params["InstanceType"],
            market=market,
            private_ip=item.findtext("privateIpAddress") or "",
            public_ip=item.findtext("ipAddress") or None,
            user_data=base64.b64decode(params.get("UserData", "")).decode(),
            public_key=self.keys[params["KeyName"]],
            groups=tuple(groups),
            tags=tag_specifications(params).get("instance", {}),
            token=params.get("ClientToken", ""),
            image=params["ImageId"],
            made=now,
            visible_at=now + times.visible,
            running_at=now + times.boot,
        )
        if params.get("Placement.GroupName"):
            self.used[id] = params["Placement.GroupName"]
        self.machines.started(instance)

    def _DescribeInstances(self, request: Request) -> Answer:
        for id in listed(request.params, "InstanceId"):
            if self.machines.shown(id) is None:
                return error("ec2", "InvalidInstanceID.NotFound", f"no instance {id}")
        # States are ours, so a filter for them is as well.
        requested = filters(request.params).get("instance-state-name")
        plain = dict(request.params)
        for key, value in request.params.items():
            if value == "instance-state-name" and key.endswith(".Name"):
                prefix = key[: -len("Name")]
                plain = {k: v for k, v in plain.items() if not k.startswith(prefix)}
        answer = self.forward(Request(request.service, request.action, request.region, plain))
        return self._overlaid(answer, requested) if answer.status == 200 else answer

    def _overlaid(self, answer: Answer, requested: list[str] | None = None) -> Answer:
        """The answer with states and addresses as they are in this cloud."""
        now = time.time()
        root, pairs = edited(answer, "instancesSet")
        launch = root.tag == "RunInstancesResponse"
        for parent, item in pairs:
            instance = self.machines.all.get(item.findtext("instanceId"))
            if instance is None:
                continue
            state = "pending" if launch else instance.state(now)
            if (not launch and now < instance.visible_at) or (requested and state not in requested):
                parent.remove(item)
                continue
            _set_state(item, state, instance.reason)
            _set_text(item, "privateIpAddress", instance.private_ip or None)
            _set_text(item, "ipAddress", instance.public_ip if state == "running" else None)
            _set_text(item, "clientToken", instance.token or None)
        reservations = root.find("reservationSet")
        for reservation in list(reservations) if reservations is not None else []:
            if not len(reservation.find("instancesSet")):  # type: ignore[arg-type]
                reservations.remove(reservation)  # type: ignore[union-attr]
        return rendered(root)

    def _DescribeVolumes(self, request: Request) -> Answer:
        answer = self.forward(request)
        if answer.status != 200:
            return answer
        root, pairs = edited(answer, "volumeSet")
        for parent, item in pairs:  # disks are seen no sooner than their machines
            owner = item.findtext("attachmentSet/item/instanceId")
            if owner is not None and owner in self.machines.all and self.machines.shown(owner) is None:
                parent.remove(item)
        return rendered(root)

    def _TerminateInstances(self, request: Request) -> Answer:
        ids = listed(request.params, "InstanceId")
        unknown = [id for id in ids if self.machines.shown(id) is None]
        if unknown:
            return error("ec2", "InvalidInstanceID.NotFound", f"no instance {', '.join(unknown)}")
        before = {id: self.machines.all[id].state(time.time()) for id in ids}
        self.end(request.region, [id for id in ids if self.machines.ended(id)])
        now = time.time()
        items = [
            f"<item><instanceId>{id}</instanceId><currentState><code>32</code>"
            f"<name>{self.machines.all[id].state(now)}</name></currentState>"
            f"<previousState><code>16</code><name>{before[id]}</name></previousState></item>"
            for id in ids
        ]
        return xml("TerminateInstances", f"<instancesSet>{''.join(items)}</instancesSet>")

    def end(self, region: str, ids: Iterable[str]) -> None:
        """Has moto end machines whose end is decided, so that their disks and interfaces go with them."""
        for id in ids:
            params = {"Action": "TerminateInstances", "Version": "2016-11-15", "InstanceId.1": id}
            self.forward(Request("ec2", "TerminateInstances", region, params))

    def _ImportKeyPair(self, request: Request) -> Answer:
        answer = self.forward(request)
        if answer.status == 200:
            material = base64.b64decode(request.params["PublicKeyMaterial"]).decode()
            self.keys[request.params["KeyName"]] = material
        return answer

    def _DeleteSecurityGroup(self, request: Request) -> Answer:
        now, group = time.time(), request.params.get("GroupId", "")
        users = [i.id for i in self.machines.all.values() if group in i.groups and i.state(now) != "terminated"]
        if users:
            return error("ec2", "DependencyViolation", f"{group} has a dependent object: {', '.join(users)}")
        return self.forward(request)

    def _CreatePlacementGroup(self, request: Request) -> Answer:
        key = (request.region, request.params["GroupName"])
        if key in self.placements:
            return error("ec2", "InvalidPlacementGroup.Duplicate", f"{key[1]} exists")
        self.placements[key] = tag_specifications(request.params).get("placement-group", {})
        return xml("CreatePlacementGroup", "<return>true</return>")

    def _DescribePlacementGroups(self, request: Request) -> Answer:
        asked = filters(request.params)
        requested = {k[4:]: v for k, v in asked.items() if k.startswith("tag:")}
        keys, names = asked.get("tag-key", []), asked.get("group-name")
        items = [
            f"<item><groupName>{escape(name)}</groupName><strategy>cluster</strategy><state>available</state>"
            f"<tagSet>{''.join(_tag(key, value) for key, value in tags.items())}</tagSet></item>"
            for (region, name), tags in self.placements.items()
            if region == request.region and all(tags.get(key) in values for key, values in requested.items())
            if all(key in tags for key in keys) and (names is None or name in names)
        ]
        return xml("DescribePlacementGroups", f"<placementGroupSet>{''.join(items)}</placementGroupSet>")

    def _DeletePlacementGroup(self, request: Request) -> Answer:
        key, now = (request.region, request.params["GroupName"]), time.time()
        if key not in self.placements:
            return error("ec2", "InvalidPlacementGroup.Unknown", f"{key[1]} does not exist")
        if any(name == key[1] and self.machines.all[id].state(now) != "terminated" for id, name in self.used.items()):
            return error("ec2", "InvalidPlacementGroup.InUse", f"{key[1]} is in use")
        del self.placements[key]
        return xml("DeletePlacementGroup", "<return>true</return>")

    def _DescribeCapacityReservations(self, request: Request) -> Answer:
        return self.reserved.described(request)

    def _DescribeInstanceConnectEndpoints(self, request: Request) -> Answer:
        items = [
            f"<item><instanceConnectEndpointId>eice-{number}</instanceConnectEndpointId><state>create-complete</state>"
            f"<vpcId>{vpc}</vpcId><preserveClientIp>false</preserveClientIp>"
            f"<securityGroupIdSet><item>{group}</item></securityGroupIdSet></item>"
            for number, (vpc, group) in enumerate(self.endpoints)
        ]
        body = f"<instanceConnectEndpointSet>{''.join(items)}</instanceConnectEndpointSet>"
        return xml("DescribeInstanceConnectEndpoints", body)

    def _DescribeSpotPriceHistory(self, request: Request) -> Answer:
        return shop.spot_prices(request, self.spot)

    def _DescribeImages(self, request: Request) -> Answer:
        own = pictures.described(request, self.images)
        return own if own is not None else shop.images(request)

    def _CreateImage(self, request: Request) -> Answer:
        return pictures.created(request, self.images, self.machines)

    def _DeregisterImage(self, request: Request) -> Answer:
        return pictures.deregistered(request, self.images)

    def _DeleteSnapshot(self, request: Request) -> Answer:
        return pictures.deleted(request, self.images)

    def _DescribeInstanceTypes(self, request: Request) -> Answer:
        key = request.body + request.region.encode()  # takes moto a while, and never changes
        if key not in self.kept:
            self.kept[key] = self.forward(request)
        return self.kept[key]

    def _GetParameter(self, request: Request) -> Answer:
        return shop.parameter(request)

    def _GetServiceQuota(self, request: Request) -> Answer:
        return shop.quota(request, self.quotas)

    def _GetProducts(self, request: Request) -> Answer:
        return shop.products(request, self.demand)

    def _items(self, answer: Answer) -> list[Any]:
        return [item for _, item in edited(answer, "instancesSet")[1]]


_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48}


def _untagged(request: Request) -> list[str]:
    tags = tag_specifications(request.params)
    kinds = _CREATES.get(request.action, ()) if request.service == "ec2" else ()
    return [f"{kind}: {name}" for kind in kinds for name in REQUIRED_TAGS if name not in tags.get(kind, {})]


def _set_state(item: Any, state: str, reason: str) -> None:
    from xml.etree.ElementTree import SubElement

    for element in item.iter("instanceState"):
        element.find("code").text, element.find("name").text = str(_CODES[state]), state
    if reason:
        for old in item.findall("stateReason"):
            item.remove(old)
        element = SubElement(item, "stateReason")
        SubElement(element, "code").text, SubElement(element, "message").text = reason, reason


def _set_text(item: Any, name: str, text: str | None) -> None:
    from xml.etree.ElementTree import SubElement

    for old in item.findall(name):
        item.remove(old)
    if text is not None:
        SubElement(item, name).text = text


def _tag(key: str, value: str) -> str:
    return f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>"
