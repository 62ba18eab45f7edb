"""Opening a pool on EC2: group, key and machines in order, all of it undone if any of it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from skyward.api.spec import Spec
from skyward.errors import NoCapacity, NotGivenBack
from skyward.machines.ledger import Ledger
from skyward.machines.offers import CloudOffer, wish
from skyward.providers.aws.admission import ssh_rule
from skyward.providers.aws.api import Api
from skyward.providers.aws.efa import EfaChoice
from skyward.providers.aws.giveback import give_back
from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.keys import ensure_key, forget, make_keys, trust
from skyward.providers.aws.launch import Order, launch
from skyward.providers.aws.machines import CloudMachine
from skyward.providers.aws.network import Subnet, ensure_group
from skyward.providers.aws.tags import POOL, Terms
from skyward.providers.aws.userdata import user_data

__all__ = ["Settings", "forget_machines", "open_pool", "trust_machines"]

Ready = Callable[[Order, list[str]], list[CloudMachine]]


@dataclass(frozen=True)
class Settings:
    """The provider's settings that matter for launching."""

    owner: str
    subnets: Sequence[Subnet]
    image: Callable[[CloudOffer], MachineImage]
    group: str | None
    ssh_from: str | None
    own_address: Callable[[], str]
    entrance: Sequence[dict[str, Any]] | None
    """The rules by which ssh gets in; if None, from the addresses of `ssh_from` or from this computer's."""
    proxy: Callable[[str], str] | None
    private: bool
    root_gb: int | None
    throughput: int | None
    profile: str | None
    close: bool | None
    efa: EfaChoice
    lease: float
    tags: tuple[tuple[str, str], ...]


def open_pool(
    api: Api,
    pool: str,
    spec: Spec,
    settings: Settings,
    tries: Sequence[Sequence[CloudOffer]],
    count: int,
    ready: Ready,
    joining: bool = False,
) -> list[CloudMachine]:
    """Machines for a new pool, or, if `joining`, more of them for one that this process holds."""
    settings.image(tries[0][0])  # an image that is not there is found before anything is created
    held = Ledger.held(pool) if joining else None
    if held is not None:
        settings, tries = _alike(held, settings, tries)
    ledger = held or _started(api, pool, spec, settings)
    try:
        order = _order(api, ledger, spec, count, settings, tries)
        made = launch(order, tries, count, partial(ready, order))
        ledger.note(volumes=[id for machine in made for id in machine.volumes])  # by which they are known to be ours
        trust_machines(made)
        return made
    except BaseException as exc:
        if held is None:
            _undone(api, pool, ledger, exc)
        raise


def trust_machines(machines: Sequence[CloudMachine]) -> None:
    """Has ssh expect the pool's host key at the addresses of these machines."""
    for pool, ledger in _ledgers(machines).items():
        targets = [machine.ssh for machine in machines if machine.tags.get(POOL) == pool]
        trust(make_keys(ledger.directory), [target.host for target in targets if target is not None])


def forget_machines(machines: Sequence[CloudMachine]) -> None:
    """Has ssh forget the addresses of machines that are gone."""
    for pool, ledger in _ledgers(machines).items():
        ours = [machine for machine in machines if machine.tags.get(POOL) == pool]
        forget(make_keys(ledger.directory), [ip for m in ours for ip in (m.public_ip, m.private_ip) if ip])


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


def _order(
    api: Api,
    ledger: Ledger,
    spec: Spec,
    count: int,
    settings: Settings,
    tries: Sequence[Sequence[CloudOffer]],
) -> Order:
    metadata = ledger.history.metadata
    terms = Terms(ledger.pool, metadata["owner"], metadata["expires"], _version(), settings.tags)
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


def _alike(
    ledger: Ledger, settings: Settings, tries: Sequence[Sequence[CloudOffer]]
) -> tuple[Settings, Sequence[Sequence[CloudOffer]]]:
    """Machines that join a pool use EFA if its others do, and are in their zone then: it does not lead out of it."""
    made = [record.data for record in ledger.history.made("instance").values()]
    if not made or not made[-1].get("efa"):  # earlier ones may have been of a try that came to nothing
        return replace(settings, efa=replace(settings.efa, asked=False)), tries
    zone = made[-1].get("zone")
    near = [offers for offers in tries if len(offers) == 1 and offers[0].zone == zone]
    if not near:
        raise NoCapacity(ledger.pool, [f"machines of this pool use EFA, and none is offered in {zone}"])
    return settings, near


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


def _ledgers(machines: Sequence[CloudMachine]) -> dict[str, Ledger]:
    pools = dict.fromkeys(machine.tags.get(POOL, "") for machine in machines)
    found = {pool: Ledger.held(pool) for pool in pools if pool}
    return {pool: ledger for pool, ledger in found.items() if ledger is not None}


def _version() -> str:
    try:
        return version("skyward")
    except PackageNotFoundError:
        return "unknown"
