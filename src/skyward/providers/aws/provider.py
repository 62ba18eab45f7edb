"""Machines from EC2: the cheapest that fit, and not one left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from skyward.accelerators import Accelerator
from skyward.api.provider import Admission, Availability, Lease, Leftover, Machine, Offer, Provider
from skyward.api.shell import Access, Shell
from skyward.api.spec import Spec
from skyward.api.usage_errors import FOR_MACHINES, corrects
from skyward.errors import NoOffer
from skyward.machines.cloud import LEASE_FILE, CloudReceipt
from skyward.machines.ledger import Ledger, given_back
from skyward.machines.offers import CloudOffer, Plan
from skyward.providers.aws import notices
from skyward.providers.aws.api import Account, Api, Pace, Report, connect, only_errors_of_ours, recalled
from skyward.providers.aws.checks import check_endpoint, check_settings, check_zones, tag_pairs, texts, usual_region
from skyward.providers.aws.choose import Choice, EfaChoice, attempts, find_reservation, make_plan, variant_of
from skyward.providers.aws.giveback import allowed, found_leftovers, give_back
from skyward.providers.aws.images import (
    LOGIN,
    UNUSED,
    Kept,
    MachineImage,
    delete,
    image_finder,
    keep,
    kept,
    known_user,
    listed,
    warm_finder,
)
from skyward.providers.aws.keys import prepare, settle
from skyward.providers.aws.launch import Settings, Wanted, add_machines, forget_machines, open_pool, trust_machines
from skyward.providers.aws.machines import (
    CloudMachine,
    Way,
    admission,
    check_programs,
    check_way,
    described,
    end,
    entrance,
    find_endpoint,
    note_ends,
    proxy_command,
)
from skyward.providers.aws.network import (
    ADDRESS_SERVICE,
    Subnet,
    checked_cidr,
    own_address,
    readmit,
    subnets,
    utc_now,
    your_group,
)

__all__ = ["AWS"]

_HASTE = 20.0  # seconds that a look at what exists may wait for one place


@only_errors_of_ours("offers", "availability", "acquire", "give_back", "find")
@corrects(FOR_MACHINES)
@dataclass(frozen=True)
class AWS(Provider):
    """Machines from Amazon EC2; credentials come from where all AWS tools take them.

    Args:
        region: where machines are launched. Default: where the login's settings say, else "us-east-1".
        profile: the profile of your AWS settings. Default: as for other tools.
        zones: availability zones to choose from. Default: all of the region.
        instance_types: types to choose from, such as ["g5.xlarge", "g6.*"]. Default: any.
        ami: the id of a machine image. Default: Ubuntu, with accelerators AWS's Deep Learning Base image.
        ubuntu_version: which Ubuntu, if no `ami` is given. Default: "24.04".
        username: the image's user, who may use sudo. Default: that of its distribution.
        subnet_id: your own subnet, or several. Default: those of the default VPC.
        security_group_id: your own group, which is not changed. Default: one is made.
        instance_profile: a role for your code, by name or ARN. Default: none.
        use_private_ip: whether this computer reaches the private addresses of the VPC. Default: False.
        via: how ssh gets there: "ssm" or "eice", with the program `aws`. Default: None, to their address.
        ssh_from: the addresses that may reach port 22, as "203.0.113.0/24". Default: this computer's, as it changes.
        address_service: a URL that answers with the caller's address. Default: one of AWS.
        root_disk_gb: size of the disk in GB. Default: 50, or what the image needs.
        root_disk_throughput: its speed in MiB/s, 125 to 2000. Default: 125, where the image is large 300.
        burstable: whether t3, t3a and t4g may be chosen without being named. Default: False.
        exclude_burstable: whether they are left out even if `instance_types` has them. Default: False.
        capacity_reservation: the id of a reservation or capacity block, into which all are launched. Default: none.
        efa: whether machines use EFA. Default: None: several with NVIDIA GPUs do, where type, image and group have it.
        placement_group: whether machines are placed close together. Default: None: those with accelerators are.
        lease: seconds after which a machine ends itself when nobody has renewed its lease. Default: 900.
        ssh_timeout: seconds that a running machine may take to let us in. Default: 300.
        tags: more tags for all that is created, as a dict. Default: none.
        owner: whose pools these are, in tags. Default: the login's ARN.
        request_timeout: seconds that AWS may take for an answer. Default: 60.
        endpoint_url: another address of the API, such as that of a test cloud. Default: AWS's.
        pace: how often AWS is asked; for tests. Default: what AWS allows.
        warm: set by pools whose image says warm=True: the environment that machines may start with. Default: none.
    """

    region: str = ""
    profile: str | None = None
    zones: Sequence[str] = ()
    instance_types: Sequence[str] = ()
    ami: str | None = None
    ubuntu_version: str = "24.04"
    username: str | None = None
    subnet_id: str | Sequence[str] = ()
    security_group_id: str | None = None
    instance_profile: str | None = None
    use_private_ip: bool = False
    via: Way | None = None
    ssh_from: str | None = None
    address_service: str = ADDRESS_SERVICE
    root_disk_gb: int | None = None
    root_disk_throughput: int | None = None
    burstable: bool = False
    exclude_burstable: bool = False
    capacity_reservation: str | None = None
    efa: bool | None = None
    placement_group: bool | None = None
    lease: float = 900
    ssh_timeout: float = 300
    tags: Mapping[str, str] | Sequence[tuple[str, str]] = ()
    owner: str | None = None
    request_timeout: float = 60
    endpoint_url: str | None = None
    pace: Pace = field(default_factory=Pace, repr=False)
    warm: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.region == "":
            object.__setattr__(self, "region", usual_region(self.profile, os.environ))
        check_settings(self, self.pace.boot)
        check_way(self.via)
        if self.ssh_from is not None:
            object.__setattr__(self, "ssh_from", checked_cidr(self.ssh_from))
        for name in ("zones", "instance_types", "subnet_id"):
            object.__setattr__(self, name, texts(name, getattr(self, name)))
        object.__setattr__(self, "tags", tag_pairs(self.tags))

    @property
    def access(self) -> Access:
        # in a group of our own everybody reaches everybody; in the user's, that has to be found out
        network = "auto" if self.security_group_id else "mesh"
        return Access(
            self.lease,
            self.ssh_timeout,
            network,
            LEASE_FILE,
            settle=settle,
            notices=notices.wait,
            prepare=prepare,
            login=LOGIN,
        )

    @property
    def rented(self) -> bool:
        return True

    @property
    def elastic(self) -> bool:
        return True

    # opening

    def offers(self, spec: Spec, count: int | None = None, report: Report | None = None) -> Plan:
        """What would be launched and at what price; creates nothing."""
        here = _at(self, spec)
        api = _api(here, report)
        api.identity()
        image = image_finder(api, self.ami, self.ubuntu_version)
        return _planned(here, api, spec, _count(spec, count), image)

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return allowed(lambda region: _api(_hasty(self, region=region), None), offers, count)

    def acquire(
        self, spec: Spec, pool: str, count: int | None = None, timeout: float = 300, report: Report | None = None
    ) -> AwsLease:
        """If it fails, nothing is left, or `NotGivenBack` says what is."""
        here = _at(self, spec)
        api = _api(here, report)
        wanted = _wanted(here, api, spec, _count(spec, count), timeout)
        ledger, made = open_pool(api, pool, spec, wanted)
        return AwsLease(here, ledger, made, variant_of(made[0].kind, wanted.offers, spec.accelerator))

    # closing, and what is left

    def give_back(self, pool: str, report: Report | None = None) -> CloudReceipt:
        """Confirms it; may be repeated, and works without the ledger. What is not proven to be the pool's is left
        alone.
        """
        with given_back(pool) as ledger:
            here = self if ledger is None else _recorded(self, ledger.history.metadata, ledger.history.region)
            return give_back(_api(here, report), pool, _login(here), ledger, report or (lambda text: None))

    def find(self) -> list[Leftover]:
        hasty = _hasty(self)
        owner, api = _login(hasty), _api(hasty, None)
        return found_leftovers(api, owner)

    def warmed(self, key: str) -> AWS:
        return replace(self, warm=key)

    def keep(self, machine: Machine, shell: Shell, cache: str, directory: str) -> str | None:
        assert isinstance(machine, CloudMachine)
        here = replace(self, region=machine.region or self.region)
        told = keep(_api(here, None), _login(here), self.warm, machine, shell, cache, directory)
        self.discard(UNUSED)
        return told

    def kept(self) -> list[Leftover]:
        found = [listed(_api(here, None), item) for here, item in _kept(self)]
        return [item for item in found if item is not None]

    def discard(self, unused: float = 0.0) -> list[str]:
        old = [(here, item) for here, item in _kept(self) if time.time() - item.used >= unused]
        deleted = [delete(_api(here, None), item) for here, item in old]
        return [id for id in deleted if id]

    def reopened(self, metadata: Mapping[str, Any]) -> AWS:
        known = _recorded(self, metadata)
        return known if known.owner is not None else replace(known, owner=_login(known))


@only_errors_of_ours("more", "refresh", "readmit", "terminate")
class AwsLease(Lease):
    def __init__(
        self, aws: AWS, ledger: Ledger, machines: Sequence[CloudMachine], accelerator: Accelerator | None
    ) -> None:
        cost = sum(machine.price.total for machine in machines)
        super().__init__(aws, ledger.pool, machines, hourly_cost=cost, accelerator=accelerator, ledger=ledger)
        self._aws, self._ledger = aws, ledger
        self.region = aws.region

    def more(
        self, spec: Spec, count: int, timeout: float = 300, report: Report | None = None
    ) -> Sequence[CloudMachine]:
        api = _api(self._aws, report)
        return add_machines(api, self._ledger, spec, _wanted(self._aws, api, spec, count, timeout))

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        aws, api = self._aws, _api(_hasty(self._aws), None)
        user = known_user(api, aws.username, aws.ami, machines)
        ids = [machine.id for machine in machines]
        found = described(api, ids, user=user, private=aws.use_private_ip, proxy=_proxy(aws))
        trust_machines(self._ledger, found)
        note_ends(self._ledger, found)
        fresh = {machine.id: machine for machine in found}
        return [fresh.get(machine.id, machine) for machine in machines]

    def readmit(self) -> Admission:
        aws, history = self._aws, self._ledger.history
        if aws.via is not None and not history.metadata.get("ssh_from"):
            return admission(aws.via)
        own = partial(_own_address, aws)
        if aws.security_group_id is not None:
            return your_group(aws.security_group_id, own)
        groups = history.left("security-group")
        if not groups:
            return Admission()
        return readmit(_api(_hasty(aws), None), groups[0], aws.ssh_from, own, utc_now)

    def terminate(self, machines: Sequence[Machine]) -> None:
        for refused in end(_api(self._aws, None), [machine.id for machine in machines]).values():
            if refused.kind != "missing":
                raise refused
        ended = [machine for machine in machines if isinstance(machine, CloudMachine)]
        forget_machines(self._ledger, ended)
        note_ends(self._ledger, ended, by_us=True)


def _wanted(aws: AWS, api: Api, spec: Spec, count: int, timeout: float) -> Wanted:
    if aws.via is not None:
        check_programs(aws.via)
    owner = api.identity()
    image = image_finder(api, aws.ami, aws.ubuntu_version)
    if aws.warm:
        image = warm_finder(api, aws.owner or owner, aws.warm, image)
    plan = _planned(aws, api, spec, count, image)
    if not plan.offers:
        raise NoOffer(plan.wish, plan.provider, [str(reason) for reason in plan.ruled_out])
    tries = attempts(plan.offers, count, spec.allocation == "cheapest")
    user = aws.username or image(tries[0][0]).user
    return Wanted(count, plan.offers, tries, _settings(aws, api, owner, image, spec), user, timeout)


def _kept(aws: AWS) -> list[tuple[AWS, Kept]]:
    found = [(_hasty(aws, region=k.region, profile=k.profile, endpoint_url=k.endpoint_url), k) for k in kept()]
    return [(here, item) for here, item in found if aws.owner in (None, item.owner)]


def _login(aws: AWS) -> str:
    return aws.owner or _api(aws, None).identity()


def _recorded(aws: AWS, metadata: Mapping[str, Any], region: str | None = None) -> AWS:
    known = {name: metadata[name] for name in ("profile", "endpoint_url", "owner") if metadata.get(name)}
    if "endpoint_url" in known:
        check_endpoint(known["endpoint_url"], aws.endpoint_url, os.environ)
    pace = recalled(metadata.get("pace")) if aws.pace == Pace() else aws.pace
    return replace(aws, region=region or metadata.get("region") or aws.region, pace=pace, **known)


def _at(aws: AWS, spec: Spec) -> AWS:
    return aws if spec.region is None or spec.region == aws.region else replace(aws, region=spec.region)


def _api(aws: AWS, report: Report | None) -> Api:
    account = Account(aws.region, aws.profile, aws.endpoint_url, aws.request_timeout, aws.pace)
    return connect(account, report)


def _planned(aws: AWS, api: Api, spec: Spec, count: int, image: Callable[[CloudOffer], MachineImage]) -> Plan:
    zones, places = tuple(aws.zones), _subnets(aws, api)
    choice = Choice(
        image=image,
        kinds=tuple(aws.instance_types),
        zones=zones,
        burstable=False if aws.exclude_burstable else aws.burstable or None,
        own_image=aws.ami is not None,
        ubuntu=aws.ubuntu_version,
        root_gb=aws.root_disk_gb,
        throughput=aws.root_disk_throughput,
        efa=_efa(aws, spec),
        reservation=find_reservation(api, aws.capacity_reservation) if aws.capacity_reservation else None,
        private=_private(aws, places),
    )
    check_zones(zones, [place.zone for place in places], aws.region)
    return make_plan(api, spec, count, choice, places)


def _efa(aws: AWS, spec: Spec) -> EfaChoice:
    own_image, own_group = aws.ami is not None, aws.security_group_id is not None
    return EfaChoice(aws.efa, _count(spec, None), own_image, own_group, aws.use_private_ip)


def _settings(aws: AWS, api: Api, owner: str, image: Callable[[CloudOffer], MachineImage], spec: Spec) -> Settings:
    places = _subnets(aws, api)
    return Settings(
        owner=aws.owner or owner,
        subnets=places,
        image=image,
        group=aws.security_group_id,
        ssh_from=aws.ssh_from,
        own_address=partial(_own_address, aws),
        entrance=_entrance(aws, api, places),
        proxy=_proxy(aws),
        private=_private(aws, places),
        root_gb=aws.root_disk_gb,
        throughput=aws.root_disk_throughput,
        profile=aws.instance_profile,
        close=aws.placement_group,
        efa=_efa(aws, spec),
        lease=aws.lease,
        tags=tuple(dict(aws.tags).items()),
    )


def _subnets(aws: AWS, api: Api) -> list[Subnet]:
    return subnets(api, aws.subnet_id, not aws.use_private_ip, demanded=aws.via is None)


def _private(aws: AWS, places: Sequence[Subnet]) -> bool:
    return aws.use_private_ip or not all(place.public for place in places)


def _entrance(aws: AWS, api: Api, places: Sequence[Subnet]) -> list[dict[str, Any]] | None:
    if aws.via is None or aws.security_group_id is not None:
        return None
    endpoint = find_endpoint(api, places[0].vpc) if aws.via == "eice" else None
    return None if endpoint is not None and endpoint.keeps_address else entrance(endpoint)


def _proxy(aws: AWS) -> Callable[[str], str] | None:
    return None if aws.via is None else partial(proxy_command, aws.via, aws.region, aws.profile)


def _own_address(aws: AWS) -> str:
    return own_address(aws.use_private_ip, aws.address_service)


def _hasty(aws: AWS, **changes: Any) -> AWS:
    """With less patience, for questions that are repeated anyway."""
    return replace(aws, pace=replace(aws.pace, budget=min(aws.pace.budget, _HASTE)), **changes)


def _count(spec: Spec, count: int | None) -> int:
    return count or (spec.nodes if isinstance(spec.nodes, int) else spec.nodes[1])
