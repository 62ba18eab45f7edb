"""Machines from EC2: the cheapest that fit, and not one left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from skyward.api.provider import Admission, Availability, Holding, Leftover, Machine, Offer, Provider
from skyward.api.shell import Access, Shell
from skyward.api.spec import Spec
from skyward.api.usage_errors import FOR_MACHINES, corrects
from skyward.errors import InvalidArgument, NoOffer
from skyward.machines.cloud import LEASE_FILE, CloudReceipt
from skyward.machines.ledger import Ledger, remove
from skyward.machines.offers import CloudOffer, Plan
from skyward.providers.aws import notices
from skyward.providers.aws.api import Account, Api, Pace, Report, connect, only_errors_of_ours, recalled
from skyward.providers.aws.billing import allowed
from skyward.providers.aws.checks import check_endpoint, check_settings, check_zones, tag_pairs, texts, usual_region
from skyward.providers.aws.choose import Choice, EfaChoice, attempts, find_reservation, make_plan, variant_of
from skyward.providers.aws.giveback import found_leftovers, give_back
from skyward.providers.aws.images import LOGIN, MachineImage, image_finder, known_user
from skyward.providers.aws.keys import prepare, settle
from skyward.providers.aws.launch import Order, Settings, forget_machines, open_pool, trust_machines, wait_ready
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
from skyward.providers.aws.warm import UNUSED, Kept, delete, keep, kept, listed, warm_finder

__all__ = ["AWS"]

_HASTE = 20.0  # seconds that a look at what exists may wait for one place


@only_errors_of_ours(
    "offers", "availability", "acquire", "acquire_more", "refresh", "readmit", "terminate", "give_back", "find"
)
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
        username: the user of the image, who may use sudo. Default: the one that images of its distribution have.
        subnet_id: your own subnet, or several. Default: those of the default VPC.
        security_group_id: your own group, which is not changed. Default: one is made.
        instance_profile: a role for your code, by name or ARN. Default: none.
        use_private_ip: whether this computer reaches the private addresses of the VPC. Default: False.
        via: how ssh gets there: "ssm" or "eice", with the program `aws`. Default: None, to their address.
        ssh_from: the addresses that may reach port 22, as "203.0.113.0/24". Default: this computer's, as it changes.
        address_service: a URL that answers with the address from which it is asked. Default: one of AWS.
        root_disk_gb: size of the disk in GB. Default: 50, or what the image needs.
        root_disk_throughput: its speed in MiB/s, 125 to 2000. Default: 125, where the image is large 300.
        burstable: whether t3, t3a and t4g may be chosen without being named. Default: False.
        exclude_burstable: whether they are left out even if `instance_types` has them. Default: False.
        capacity_reservation: the id of a reservation or capacity block, into which all are launched. Default: none.
        efa: whether machines use EFA. Default: None: several with NVIDIA GPUs do, where type, image and group have it.
        placement_group: whether machines are placed close together. Default: None: those with accelerators are.
        lease: a machine ends itself when nobody has renewed its lease for so many seconds. Default: 900.
        ssh_timeout: seconds that a machine which runs may take until it lets us in. Default: 300.
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
        here = self._at(spec)
        api = here._api(report)
        api.identity()
        image = image_finder(api, self.ami, self.ubuntu_version)
        return here._planned(api, spec, _count(spec, count), image)

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return allowed(lambda region: self._hasty(region=region)._api(None), offers, count)

    def acquire(
        self, spec: Spec, pool: str, count: int | None = None, timeout: float = 300, report: Report | None = None
    ) -> Holding:
        """Machines that run and have addresses, for a new pool.

        If it fails, nothing that was created here is left, or `NotGivenBack` says what is.
        """
        return self._acquired(spec, pool, _count(spec, count), timeout, report, joining=False)

    def acquire_more(
        self, spec: Spec, pool: str, count: int, timeout: float = 300, report: Report | None = None
    ) -> Holding:
        if Ledger.held(pool) is None:
            raise InvalidArgument(f"no pool {pool!r} is open in this process, so none can be given more machines.")
        return self._acquired(spec, pool, count, timeout, report, joining=True)

    # while a pool is open

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        fresh: dict[str, CloudMachine] = {}
        for region, ids in self._by_region(machines).items():
            here = self._hasty(region=region)
            api, how = here._api(None), {"private": self.use_private_ip, "proxy": here._proxy}
            some = described(api, ids, user=known_user(api, self.username, self.ami, machines), **how)
            fresh |= {machine.id: machine for machine in some}
            trust_machines(some)
            note_ends(some)
        return [fresh.get(machine.id, machine) for machine in machines]

    def readmit(self, pool: str) -> Admission:
        ledger = Ledger.held(pool)
        if self.via is not None and (ledger is None or not ledger.history.metadata.get("ssh_from")):
            return admission(self.via)
        if self.security_group_id is not None:
            return your_group(self.security_group_id, self._own_address)
        groups = () if ledger is None else ledger.history.left("security-group")
        if ledger is None or not groups:
            return Admission()
        here = self._hasty(region=ledger.history.region or self.region)
        return readmit(here._api(None), groups[0], self.ssh_from, self._own_address, utc_now)

    def terminate(self, machines: Sequence[Machine]) -> None:
        for region, ids in self._by_region(machines).items():
            for refused in end(replace(self, region=region)._api(None), ids).values():
                if refused.kind != "missing":
                    raise refused
            ended = [m for m in machines if isinstance(m, CloudMachine) and m.id in ids]
            forget_machines(ended)
            note_ends(ended, by_us=True)

    # closing, and what is left

    def give_back(self, pool: str, report: Report | None = None) -> CloudReceipt:
        """Ends everything of a pool and confirms it by reading back; may be repeated, and works without the ledger.

        What only carries the pool's tag, and is not proven to have been made for it, is left alone.
        """
        ledger = Ledger.held(pool) or Ledger.resume(pool)
        try:
            here = self if ledger is None else self._recorded(ledger.history.metadata, ledger.history.region)
            receipt = give_back(here._api(report), pool, here._login(), ledger, report or (lambda text: None))
            remove(pool)
            return receipt
        except BaseException:
            if ledger is not None:
                ledger.let_go()  # whoever finishes it has to be able to take it over
            raise

    def find(self) -> list[Leftover]:
        hasty = self._hasty()
        owner, api = hasty._login(), hasty._api(None)
        return found_leftovers(api, owner)

    def warmed(self, key: str) -> AWS:
        return replace(self, warm=key)

    def keep(self, machine: Machine, shell: Shell, cache: str, directory: str) -> str | None:
        assert isinstance(machine, CloudMachine)
        here = replace(self, region=machine.region or self.region)
        told = keep(here._api(None), here._login(), self.warm, machine, shell, cache, directory)
        self.discard(UNUSED)
        return told

    def kept(self) -> list[Leftover]:
        found = [listed(here._api(None), item) for here, item in self._kept()]
        return [item for item in found if item is not None]

    def discard(self, unused: float = 0.0) -> list[str]:
        old = [(here, item) for here, item in self._kept() if time.time() - item.used >= unused]
        deleted = [delete(here._api(None), item) for here, item in old]
        return [id for id in deleted if id]

    def reopened(self, metadata: Mapping[str, Any]) -> AWS:
        known = self._recorded(metadata)
        return known if known.owner is not None else replace(known, owner=known._login())

    # how

    def _acquired(
        self, spec: Spec, pool: str, count: int, timeout: float, report: Report | None, joining: bool
    ) -> Holding:
        if self.via is not None:
            check_programs(self.via)
        here = self._at(spec)
        api = here._api(report)
        owner = api.identity()
        image = image_finder(api, self.ami, self.ubuntu_version)
        if self.warm:
            image = warm_finder(api, self.owner or owner, self.warm, image)
        plan = here._planned(api, spec, count, image)
        if not plan.offers:
            raise NoOffer(plan.wish, plan.provider, [str(reason) for reason in plan.ruled_out])
        tries = attempts(plan.offers, count, spec.allocation == "cheapest")
        user = self.username or image(tries[0][0]).user

        def ready(order: Order, ids: list[str]) -> list[CloudMachine]:
            # from when they were launched: what was tried before has cost them nothing
            return wait_ready(order, ids, time.monotonic() + timeout, user)

        made = open_pool(api, pool, spec, here._settings(api, owner, image, spec), tries, count, ready, joining)
        accelerator = variant_of(made[0].kind, plan.offers, spec.accelerator)
        return Holding(pool, tuple(made), sum(machine.price.total for machine in made), accelerator)

    def _kept(self) -> list[tuple[AWS, Kept]]:
        found = [(self._hasty(region=k.region, profile=k.profile, endpoint_url=k.endpoint_url), k) for k in kept()]
        return [(here, item) for here, item in found if self.owner in (None, item.owner)]

    def _login(self) -> str:
        return self.owner or self._api(None).identity()

    def _recorded(self, metadata: Mapping[str, Any], region: str | None = None) -> AWS:
        known = {name: metadata[name] for name in ("profile", "endpoint_url", "owner") if metadata.get(name)}
        if "endpoint_url" in known:
            check_endpoint(known["endpoint_url"], self.endpoint_url, os.environ)
        pace = recalled(metadata.get("pace")) if self.pace == Pace() else self.pace
        return replace(self, region=region or metadata.get("region") or self.region, pace=pace, **known)

    def _at(self, spec: Spec) -> AWS:
        return self if spec.region is None or spec.region == self.region else replace(self, region=spec.region)

    def _api(self, report: Report | None) -> Api:
        account = Account(self.region, self.profile, self.endpoint_url, self.request_timeout, self.pace)
        return connect(account, report)

    def _planned(self, api: Api, spec: Spec, count: int, image: Callable[[CloudOffer], MachineImage]) -> Plan:
        zones, places = tuple(self.zones), self._subnets(api)
        choice = Choice(
            image=image,
            kinds=tuple(self.instance_types),
            zones=zones,
            burstable=False if self.exclude_burstable else self.burstable or None,
            own_image=self.ami is not None,
            ubuntu=self.ubuntu_version,
            root_gb=self.root_disk_gb,
            throughput=self.root_disk_throughput,
            efa=self._efa(spec),
            reservation=find_reservation(api, self.capacity_reservation) if self.capacity_reservation else None,
            private=self._private(places),
        )
        check_zones(zones, [place.zone for place in places], self.region)
        return make_plan(api, spec, count, choice, places)

    def _efa(self, spec: Spec) -> EfaChoice:
        own_image, own_group = self.ami is not None, self.security_group_id is not None
        return EfaChoice(self.efa, _count(spec, None), own_image, own_group, self.use_private_ip)

    def _settings(self, api: Api, owner: str, image: Callable[[CloudOffer], MachineImage], spec: Spec) -> Settings:
        places = self._subnets(api)
        return Settings(
            owner=self.owner or owner,
            subnets=places,
            image=image,
            group=self.security_group_id,
            ssh_from=self.ssh_from,
            own_address=self._own_address,
            entrance=self._entrance(api, places),
            proxy=self._proxy,
            private=self._private(places),
            root_gb=self.root_disk_gb,
            throughput=self.root_disk_throughput,
            profile=self.instance_profile,
            close=self.placement_group,
            efa=self._efa(spec),
            lease=self.lease,
            tags=tuple(dict(self.tags).items()),
        )

    def _subnets(self, api: Api) -> list[Subnet]:
        return subnets(api, self.subnet_id, not self.use_private_ip, demanded=self.via is None)

    def _private(self, places: Sequence[Subnet]) -> bool:
        return self.use_private_ip or not all(place.public for place in places)

    def _entrance(self, api: Api, places: Sequence[Subnet]) -> list[dict[str, Any]] | None:
        if self.via is None or self.security_group_id is not None:
            return None
        endpoint = find_endpoint(api, places[0].vpc) if self.via == "eice" else None
        return None if endpoint is not None and endpoint.keeps_address else entrance(endpoint)

    @property
    def _proxy(self) -> Callable[[str], str] | None:
        return None if self.via is None else partial(proxy_command, self.via, self.region, self.profile)

    def _own_address(self) -> str:
        return own_address(self.use_private_ip, self.address_service)

    def _hasty(self, **changes: Any) -> AWS:
        return replace(self, pace=replace(self.pace, budget=min(self.pace.budget, _HASTE)), **changes)

    def _by_region(self, machines: Sequence[Machine]) -> dict[str, list[str]]:
        regions: dict[str, list[str]] = {}
        for machine in machines:
            region = machine.region if isinstance(machine, CloudMachine) and machine.region else self.region
            regions.setdefault(region, []).append(machine.id)
        return regions


def _count(spec: Spec, count: int | None) -> int:
    return count or (spec.nodes if isinstance(spec.nodes, int) else spec.nodes[1])
