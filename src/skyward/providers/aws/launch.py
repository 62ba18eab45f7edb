"""Launches machines: all in one call, elsewhere if there is no room, and nothing half-made left."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from skyward import __version__
from skyward.api.spec import Spec
from skyward.errors import CloudError, CloudRefused, NoCapacity, NotGivenBack
from skyward.machines.cloud import Terms, forget, make_keys, price_tags, resource_name, trust, user_data
from skyward.machines.ledger import Ledger
from skyward.machines.offers import CloudOffer, wish
from skyward.providers.aws.api import (
    Api,
    QuotaExceeded,
    Report,
    filters,
    quota_of,
    specification,
)
from skyward.providers.aws.choose import EfaChoice, interfaces
from skyward.providers.aws.giveback import give_back
from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.keys import ensure_key
from skyward.providers.aws.machines import CloudMachine, described, end
from skyward.providers.aws.network import FRESH, Subnet, ensure_group, ssh_rule
from skyward.providers.aws.prices import root_disk

__all__ = [
    "Order",
    "Settings",
    "Wanted",
    "add_machines",
    "forget_machines",
    "launch",
    "open_pool",
    "request",
    "trust_machines",
    "wait_ready",
]


# Counted for each price class and family of types; other quotas are the same whatever is taken.
_VCPU_QUOTAS = ("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded")
# What AWS says of a machine whose encrypted disk it could not make.
_NO_KEY = ("Client.InternalError", "Client.InvalidKMSKey")
_KMS = (
    "AWS ends machines like this when their disks are encrypted, which an account may demand of all disks, and the KMS "
    "key may not be used. Allow this user kms:CreateGrant, kms:Decrypt, kms:DescribeKey, kms:ReEncrypt* and "
    "kms:GenerateDataKeyWithoutPlaintext for the key; for spot, also give the role AWSServiceRoleForEC2Spot a grant. "
    "Or choose another key under EC2 > Settings > Data protection."
)


@dataclass(frozen=True)
class Order:
    api: Api
    ledger: Ledger
    terms: Terms
    wish: str
    key_name: str
    group: str
    subnets: Mapping[str, str]
    image: Callable[[CloudOffer], MachineImage]
    user_data: str
    root_gb: int | None = None
    throughput: int | None = None
    private: bool = False
    efa: Callable[[CloudOffer], bool] = lambda offer: False
    proxy: Callable[[str], str] | None = None
    profile: str | None = None
    close: bool = False
    report: Report = lambda text: None


def launch(
    order: Order,
    tries: Sequence[Sequence[CloudOffer]],
    count: int,
    ready: Callable[[list[str]], list[CloudMachine]],
) -> list[CloudMachine]:
    """From the first of `tries` that has them. A used-up quota rules out what else it counts."""
    failed: list[str] = []
    full: dict[str, QuotaExceeded] = {}
    locked: dict[str, str] = {}  # price class -> the machine whose disk could not be made
    for offers in tries:
        ids: list[str] = []
        for offer in offers:
            missing = count - len(ids)
            spread = len(offers) > 1
            quota = quota_of(offer.kind, offer.market)
            if quota in full or offer.market in locked:
                continue
            try:
                got = _ask(order, offer, 1 if spread else missing, missing, spread)
            except CloudRefused as exc:
                if isinstance(exc, QuotaExceeded) and exc.code in _VCPU_QUOTAS:
                    full[quota] = exc
                    failed.append(f"{missing} x {offer}: {exc.code}, the quota {quota}")
                    continue
                if exc.kind != "capacity":
                    undo(order, ids)
                    raise
                reason = "" if exc.code.startswith("Insufficient") else f", {exc.message[:120]}"
                failed.append(f"{missing} x {offer}: {exc.code}{reason}")
                continue
            ids += got
            if len(got) < missing:
                failed.append(f"{missing} x {offer}: only {len(got)}")
            if len(ids) >= count:
                break
        if len(ids) >= count:
            try:
                return ready(ids)
            except _Died as died:
                failed.append(f"{count} x {offers[0]}: {died}")
                if died.locked:
                    locked[offers[0].market] = str(died)
            except Exception:
                undo(order, ids)
                raise
        undo(order, ids)
    if len(full) == len(failed) and full:
        first, *others = full.values()
        for other in others:
            first.add_note(f"also: {other}")
        raise first
    if locked and len(locked) == len(failed):
        raise CloudError(f"{'; '.join(failed)}. {_KMS} Everything was released.")
    raise NoCapacity(order.wish, [*failed, *([_KMS] if locked else [])])


def wait_ready(order: Order, ids: Sequence[str], deadline: float, user: str = "ubuntu") -> list[CloudMachine]:
    began = time.monotonic()
    found: list[CloudMachine] = []
    while True:
        running = sum(machine.ready for machine in found)
        order.report(f"waiting for {len(ids)} {'machine' if len(ids) == 1 else 'machines'} to start, {running} run")
        found = described(order.api, ids, user=user, private=order.private, proxy=order.proxy)
        if len(found) == len(ids) and all(machine.ready for machine in found):
            return found
        for machine in found:
            if not machine.alive or machine.state in ("stopping", "stopped"):
                locked = machine.reason.startswith(_NO_KEY)
                raise _Died(f"{machine.id} ended at once ({machine.reason or machine.state})", locked)
        if time.monotonic() >= deadline:
            raise CloudError(_late(ids, found, time.monotonic() - began, order.private))
        time.sleep(order.api.account.pace.poll)


def undo(order: Order, ids: Sequence[str]) -> None:
    began = time.monotonic()
    left = list(ids)
    while left:
        left = [id for id, exc in end(order.api, left).items() if exc.kind == "missing"]
        if left and time.monotonic() - began > order.api.account.pace.unanswered:
            return
        if left:
            time.sleep(order.api.account.pace.poll)


def request(
    order: Order,
    offer: CloudOffer,
    image: MachineImage,
    least: int,
    most: int,
    token: str,
    close: str | None = None,
    efa: bool = False,
) -> dict[str, Any]:
    tags = {**order.terms.tags, **price_tags(offer.parts)}
    disk = root_disk(image.root_gb, order.root_gb, order.throughput, offer.disk_mbps)
    kinds = ["instance", "volume", "network-interface"]
    params: dict[str, Any] = {
        "ImageId": image.id,
        "InstanceType": offer.kind,
        "MinCount": least,
        "MaxCount": most,
        "ClientToken": token,
        "KeyName": order.key_name,
        "UserData": order.user_data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "NetworkInterfaces": interfaces(offer, order.subnets[offer.zone], order.group, order.private, efa),
        "BlockDeviceMappings": [
            {
                "DeviceName": image.root_device,
                "Ebs": {
                    "VolumeSize": disk.gb,
                    "VolumeType": "gp3",
                    "Throughput": disk.throughput,
                    "Iops": disk.iops,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
    }
    if offer.market == "spot":
        kinds.append("spot-instances-request")
        params["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    if offer.block:
        params["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if offer.reservation:
        target = {"CapacityReservationId": offer.reservation}
        params["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    if offer.burstable:
        # EC2 would take "unlimited", which bills CPU time beyond the price that the user was told
        params["CreditSpecification"] = {"CpuCredits": "standard"}
    if order.profile is not None:
        params["IamInstanceProfile"] = {"Arn" if order.profile.startswith("arn:") else "Name": order.profile}
    if close is not None:
        params["Placement"] = {"GroupName": close}
    params["TagSpecifications"] = specification(kinds, tags)
    return params


def ensure_placement(api: Api, ledger: Ledger, terms: Terms) -> str:
    name = resource_name(terms.pool)
    if ledger.history.left("placement-group"):
        return name
    call = ledger.intent("placement-group", region=api.account.region, name=name)
    try:
        tags = specification(["placement-group"], terms.tags)
        api.call("ec2", "create_placement_group", GroupName=name, Strategy="cluster", TagSpecifications=tags)
    except CloudRefused as exc:
        # a duplicate is our own if it carries our tags: the answer to the first try was lost
        ours = filters(pool=terms.pool, owner=terms.owner[:256], group_name=name)
        if exc.kind != "duplicate" or not api.pages(
            "ec2", "describe_placement_groups", "PlacementGroups", Filters=ours
        ):
            if not exc.unanswered:
                ledger.refused(call, "placement-group", exc.code)
            raise
    ledger.answer(call, "placement-group", name, region=api.account.region)
    return name


def _ask(order: Order, offer: CloudOffer, least: int, most: int, spread: bool) -> list[str]:
    image = order.image(offer)
    close = (
        ensure_placement(order.api, order.ledger, order.terms) if order.close and offer.cluster and not spread else None
    )
    # A token of its own: repeating the call for want of an answer brings the same machines, never more.
    token = uuid.uuid4().hex
    details: dict[str, Any] = {
        "type": offer.kind,
        "zone": offer.zone,
        "market": offer.market,
        "price": offer.hourly_cost,
    }
    efa = order.efa(offer) and not spread
    details |= {"parts": offer.parts.record(), **({"efa": True} if efa else {})}
    call = order.ledger.intent("instance", region=offer.region, token=token, count=most, **details)
    params = request(order, offer, image, least, most, token, close, efa)
    order.report(f"asking for {most} x {offer}")
    try:
        answer = _run(order.api, params)
    except CloudRefused as exc:
        if not exc.unanswered:
            order.ledger.refused(call, "instance", exc.code)
        if isinstance(exc, QuotaExceeded):
            quota = quota_of(offer.kind, offer.market)
            raise QuotaExceeded(exc.action, exc.code, exc.message, exc.region, exc.kind, quota) from exc
        raise
    instances: list[dict[str, Any]] = answer.get("Instances") or []
    ids = [str(item["InstanceId"]) for item in instances]
    order.ledger.answer(call, "instance", *ids, region=offer.region, **details)
    return ids


def _run(api: Api, params: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    while True:
        try:
            return api.call("ec2", "run_instances", **params)
        except CloudRefused as exc:
            fresh = exc.kind == "missing" and exc.code.startswith(
                ("InvalidGroup", "InvalidKeyPair", "InvalidPlacement")
            )
            if not fresh or time.monotonic() - began > FRESH:
                raise
            time.sleep(api.account.pace.poll)


def _late(ids: Sequence[str], found: Sequence[CloudMachine], seconds: float, private: bool) -> str:
    seen = {machine.id: machine for machine in found}
    how = ", ".join(f"{id} ({seen[id].state if id in seen else 'not shown'})" for id in ids)
    which = "private" if private else "public"
    return (
        f"machines did not start within {seconds:.0f} s: {how}. They run but have no {which} address, or AWS is slow. "
        "Everything was released. Raise provision_timeout, or name a subnet whose machines get such addresses."
    )


class _Died(Exception):
    def __init__(self, text: str, locked: bool = False) -> None:
        super().__init__(text)
        self.locked = locked


@dataclass(frozen=True)
class Settings:
    owner: str
    subnets: Sequence[Subnet]
    image: Callable[[CloudOffer], MachineImage]
    group: str | None
    ssh_from: str | None
    own_address: Callable[[], str]
    entrance: Sequence[dict[str, Any]] | None
    proxy: Callable[[str], str] | None
    private: bool
    root_gb: int | None
    throughput: int | None
    profile: str | None
    close: bool | None
    efa: EfaChoice
    lease: float
    tags: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Wanted:
    """Tried in the order of `tries`."""

    count: int
    offers: Sequence[CloudOffer]
    tries: Sequence[Sequence[CloudOffer]]
    settings: Settings
    user: str
    timeout: float


def open_pool(api: Api, pool: str, spec: Spec, wanted: Wanted) -> tuple[Ledger, list[CloudMachine]]:
    settings = wanted.settings
    settings.image(wanted.tries[0][0])  # an image that is not there is found before anything is created
    ledger = _started(api, pool, spec, settings)
    try:
        return ledger, _launched(api, ledger, spec, wanted)
    except BaseException as exc:
        _undone(api, pool, ledger, exc)
        raise


def add_machines(api: Api, ledger: Ledger, spec: Spec, wanted: Wanted) -> list[CloudMachine]:
    wanted.settings.image(wanted.tries[0][0])
    return _launched(api, ledger, spec, _alike(ledger, wanted))


def trust_machines(ledger: Ledger, machines: Sequence[CloudMachine]) -> None:
    trust(make_keys(ledger.directory), [machine.ssh.host for machine in machines if machine.ssh is not None])


def forget_machines(ledger: Ledger, machines: Sequence[CloudMachine]) -> None:
    forget(make_keys(ledger.directory), [ip for m in machines for ip in (m.public_ip, m.private_ip) if ip])


def _launched(api: Api, ledger: Ledger, spec: Spec, wanted: Wanted) -> list[CloudMachine]:
    order = _order(api, ledger, spec, wanted)

    def ready(ids: list[str]) -> list[CloudMachine]:
        # from when they were launched: what was tried before has cost them nothing
        return wait_ready(order, ids, time.monotonic() + wanted.timeout, wanted.user)

    made = launch(order, wanted.tries, wanted.count, ready)
    ledger.note(volumes=[id for machine in made for id in machine.volumes])  # by which they are known to be ours
    trust_machines(ledger, made)
    return made


def _started(api: Api, pool: str, spec: Spec, settings: Settings) -> Ledger:
    ssh_from = settings.ssh_from
    if ssh_from is None and settings.group is None and settings.entrance is None:
        ssh_from = settings.own_address()
    account = api.account
    metadata = {
        "provider": "AWS",
        "region": account.region,
        "profile": account.profile,
        "endpoint_url": account.endpoint_url,
        "owner": settings.owner,
        "expires": time.time() + spec.ttl,
        "ssh_from": ssh_from,
        "pace": asdict(account.pace),
    }
    return Ledger.start(pool, metadata)


def _order(api: Api, ledger: Ledger, spec: Spec, wanted: Wanted) -> Order:
    settings, tries, count = wanted.settings, wanted.tries, wanted.count
    metadata = ledger.history.metadata
    terms = Terms(ledger.pool, metadata["owner"], metadata["expires"], __version__, settings.tags)
    keys = make_keys(ledger.directory)
    vpc = settings.subnets[0].vpc
    efa = any(settings.efa.why_not(offers[0]) is None for offers in tries if len(offers) == 1)
    group = settings.group or ensure_group(api, ledger, terms, vpc, _entrance(settings, metadata), efa)
    close = settings.close if settings.close is not None else spec.accelerator is not None
    return Order(
        api=api,
        ledger=ledger,
        terms=terms,
        wish=wish(spec),
        key_name=ensure_key(api, ledger, terms, keys),
        group=group,
        subnets={net.zone: net.id for net in settings.subnets},
        image=settings.image,
        user_data=user_data(
            keys.host_private, keys.host_public, settings.lease, max(60.0, terms.expires - time.time())
        ),
        root_gb=settings.root_gb,
        throughput=settings.throughput,
        private=settings.private,
        efa=lambda offer: settings.efa.why_not(offer) is None,
        proxy=settings.proxy,
        profile=settings.profile,
        close=close and count > 1,
        report=api.report,
    )


def _alike(ledger: Ledger, wanted: Wanted) -> Wanted:
    """More machines use EFA if the others do, and stay in their zone."""
    made = [record.data for record in ledger.history.made("instance").values()]
    if not made or not made[-1].get("efa"):  # earlier ones may have been of a try that came to nothing
        settings = replace(wanted.settings, efa=replace(wanted.settings.efa, asked=False))
        return replace(wanted, settings=settings)
    zone = made[-1].get("zone")
    near = [offers for offers in wanted.tries if len(offers) == 1 and offers[0].zone == zone]
    if not near:
        raise NoCapacity(ledger.pool, [f"machines of this pool use EFA, and none is offered in {zone}"])
    return replace(wanted, tries=near)


def _entrance(settings: Settings, metadata: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return settings.entrance if settings.entrance is not None else [ssh_rule(metadata["ssh_from"])]


def _undone(api: Api, pool: str, ledger: Ledger, why: BaseException) -> None:
    try:
        give_back(api, pool, ledger.history.metadata["owner"], ledger, api.report)
    except NotGivenBack as exc:
        ledger.let_go()  # whoever finishes it has to be able to take it over
        raise exc from why
    except BaseException:  # Ctrl-C once more: the reaper or the lease finishes it
        ledger.let_go()
        raise
