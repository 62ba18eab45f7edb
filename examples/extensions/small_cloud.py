"""A provider for a small cloud with a REST API: what is special to it; the rest is skyward.machines.cloud."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from skyward import __version__
from skyward.api.provider import Lease, Leftover, Machine, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.errors import CloudError, CloudRefused, NoCapacity, NoOffer, NotGivenBack
from skyward.machines import cloud
from skyward.machines.cloud import Bill, Claim, CloudReceipt, Terms
from skyward.machines.ledger import History, Ledger, given_back, read
from skyward.machines.offers import CloudOffer, Price, Shape, affordable, money, ordered, unfit, wish
from skyward.machines.spent import keep

__all__ = ["Nimbus"]

_KINDS = {404: "missing", 409: "duplicate", 507: "capacity"}  # statuses that mean something; from 500 on it may be done
_TRIES = 4


@dataclass(frozen=True)
class NimbusMachine(Machine):
    """A server, and whose it is."""

    state: str = "running"
    pool: str = ""

    @property
    def gone(self) -> str:
        return "" if self.state in ("starting", "running") else f"Nimbus has ended it ({self.state})"


@dataclass(frozen=True)
class Nimbus(Provider):
    """Servers of Nimbus Cloud. Address and token of its API are in NIMBUS_URL and NIMBUS_TOKEN.

    Args:
        lease: a server ends itself when nobody has renewed its lease for so many seconds. Default: 900.
        poll: seconds between two looks at servers. Default: 2.
        patience: how many seconds giving back may take. Default: 300.
        settle: seconds that nothing may appear after a call without an answer. Default: 10.
    """

    url: str = field(default_factory=lambda: os.environ.get("NIMBUS_URL", "https://api.nimbus.example"))
    token: str = field(default_factory=lambda: os.environ.get("NIMBUS_TOKEN", ""), repr=False)
    lease: float = 900.0
    poll: float = 2.0
    patience: float = 300.0
    settle: float = 10.0

    @property
    def rented(self) -> bool:
        return True

    @property
    def elastic(self) -> bool:
        return True

    @property
    def access(self) -> Access:
        return Access(self.lease, ssh_timeout=300, lease_file=cloud.LEASE_FILE, settle=cloud.replace_host_key)

    # opening

    def offers(self, spec: Spec, count: int) -> list[CloudOffer]:
        found = [self._offer(item) for item in self._ask("GET", "types") if unfit(_shape(item), spec) is None]
        allowed, _ = affordable(ordered(found, "cheapest"), count, spec.max_hourly_cost)
        return allowed

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        offers = self._offers(spec, count)
        terms = {"provider": self.name, "owner": self._owner(), "expires": time.time() + spec.ttl}
        ledger = Ledger.start(pool, terms)  # nothing is created before it is on disk
        lease = NimbusLease(self, ledger)
        try:
            lease.machines = tuple(self._launched(ledger, offers, spec, count, timeout, report))
            return lease
        except BaseException:
            lease.close(report)
            raise

    def launch(self, ledger: Ledger, spec: Spec, count: int, timeout: float, report: Report) -> list[NimbusMachine]:
        """More servers for an open pool."""
        return self._launched(ledger, self._offers(spec, count), spec, count, timeout, report)

    def _offers(self, spec: Spec, count: int) -> list[CloudOffer]:
        offers = self.offers(spec, count)
        if not offers:
            raise NoOffer(wish(spec), self.name)
        return offers

    def _launched(
        self, ledger: Ledger, offers: Sequence[CloudOffer], spec: Spec, count: int, timeout: float, report: Report
    ) -> list[NimbusMachine]:
        metadata = ledger.history.metadata
        terms = Terms(ledger.pool, metadata["owner"], metadata["expires"], __version__)
        keys = cloud.make_keys(ledger.directory)
        if not ledger.history.left("key"):
            name = cloud.resource_name(ledger.pool)
            self._create(ledger, "key", {"name": name, "public_key": keys.login_public, "labels": terms.tags})
        life = max(60.0, terms.expires - time.time())
        data = cloud.user_data(keys.host_private, keys.host_public, self.lease, life)
        made: list[str] = []
        try:
            for offer in offers:
                while len(made) < count and (id := self._server(ledger, terms, offer, data)) is not None:
                    made.append(id)
                    report(f"{len(made)} of {count} servers are ours, this one a {offer.kind}")
            if len(made) < count:
                raise NoCapacity(wish(spec), [f"{count} x {offer.kind}" for offer in offers])
            machines = self._wait(ledger.pool, made, timeout, report)
        except BaseException:
            for id in made:
                self.delete("server", id)
            raise
        cloud.trust(keys, [machine.ssh.host for machine in machines if machine.ssh is not None])
        return machines

    def _server(self, ledger: Ledger, terms: Terms, offer: CloudOffer, data: str) -> str | None:
        """A new server; None if there is no room for its type."""
        key = cloud.resource_name(terms.pool)
        labels = {**terms.tags, **cloud.price_tags(offer.parts)}
        body = {"name": f"{key}-{uuid.uuid4().hex[:8]}", "type": offer.kind, "key": key}
        details = {"type": offer.kind, "parts": offer.parts.record(), "price": offer.hourly_cost}
        try:
            return self._create(ledger, "server", {**body, "user_data": data, "labels": labels}, **details)
        except CloudRefused as exc:
            if exc.kind == "capacity":
                return None
            raise

    def _create(self, ledger: Ledger, kind: str, body: Mapping[str, Any], **details: Any) -> str:
        """Makes a key or a server. Names are unique: if the answer was lost, asking again says "duplicate"."""
        call = ledger.intent(kind, name=body["name"], **details)
        try:
            made: dict[str, Any] = self._ask("POST", f"{kind}s", body)
        except CloudRefused as exc:
            # ours if it is exactly what we asked for; anybody could have written its labels
            same = [item for item in self.listed(f"{kind}s", ledger.pool) if body.items() <= item.items()]
            if exc.kind != "duplicate" or not same:
                if not exc.unanswered:
                    ledger.refused(call, kind, exc.code)
                raise
            made = same[0]
        ledger.answer(call, kind, made["id"], **details)
        return str(made["id"])

    def _wait(self, pool: str, ids: Sequence[str], timeout: float, report: Report) -> list[NimbusMachine]:
        deadline = time.monotonic() + timeout
        while True:
            found = {item["id"]: self.machine(item) for item in self.listed("servers", pool)}
            ready = [found[id] for id in ids if id in found and found[id].state == "running" and found[id].ssh]
            report(f"waiting for {len(ids)} servers to start, {len(ready)} run")
            if len(ready) == len(ids):
                return ready
            if ended := [found[id] for id in ids if id in found and found[id].gone]:
                raise CloudError(f"{ended[0].id} ended at once ({ended[0].state}). Everything is given back.")
            if time.monotonic() > deadline:
                raise CloudError(f"servers did not start within {timeout:.0f} s. Raise provision_timeout.")
            time.sleep(self.poll)

    # closing, and what is left

    def give_back(self, pool: str, report: Report) -> CloudReceipt:
        with given_back(pool) as ledger:
            history = ledger.history if ledger is not None else History(pool)
            receipt = self._given_back(Claim(pool, self._owner(), history))
        keep(receipt.charges())
        report(f"everything of pool {pool} is given back; {money(receipt.total)}")
        return receipt

    def find(self) -> list[Leftover]:
        owner = self._owner()
        items = [(kind, item) for kind in ("server", "key") for item in self.listed(f"{kind}s")]
        pools = {item["labels"][cloud.POOL] for _, item in items if item["labels"].get(cloud.OWNER) == owner}
        claims = {pool: Claim(pool, owner, read(pool) or History(pool)) for pool in pools}
        return [
            _leftover(kind, item, claims[pool])
            for kind, item in items
            if (pool := item["labels"].get(cloud.POOL)) in claims
        ]

    def _given_back(self, claim: Claim) -> CloudReceipt:
        began, quiet = time.monotonic(), None
        seen: dict[str, tuple[str, dict[str, Any]]] = {}
        while True:
            items = [(kind, item) for kind in ("server", "key") for item in self.listed(f"{kind}s", claim.pool)]
            ours = [(kind, item) for kind, item in items if _owns(claim, kind, item)]
            for kind, item in ours:
                seen.setdefault(item["id"], (kind, item))
                self.delete(kind, item["id"])
            now = time.monotonic()
            quiet = None if ours else now if quiet is None else quiet
            # a call without an answer may have made something that is not listed yet
            if quiet is not None and (claim.history.certain or now - quiet >= self.settle):
                break
            if ours and now - began > self.patience:
                left = [item["id"] for _, item in ours]
                raise NotGivenBack(claim.pool, self.url, left, 0.0, "They did not go within the time that was given.")
            time.sleep(self.poll)
        strange = [str(item["id"]) for _, item in items]
        told = [cloud.remark(claim.pool, strange, _command(strange))] if strange else []
        servers = {id: item for id, (kind, item) in seen.items() if kind == "server"}
        ids = dict.fromkeys([*claim.history.made("server"), *servers])
        bills = tuple(_bill(id, servers.get(id), claim.history) for id in ids)
        names = tuple(dict.fromkeys([*ids, *claim.history.made("key"), *seen]))
        return CloudReceipt(claim.pool, "Nimbus", bills, names, names, tuple(told), self.name)

    # the API

    def _owner(self) -> str:
        return str(self._ask("GET", "account")["id"])

    def listed(self, path: str, pool: str = "") -> list[dict[str, Any]]:
        return self._ask("GET", f"{path}?label={cloud.POOL}{f'={pool}' if pool else ''}")

    def delete(self, kind: str, id: str) -> None:
        try:
            self._ask("DELETE", f"{kind}s/{id}")
        except CloudRefused as exc:
            if exc.kind != "missing":
                raise

    def machine(self, item: Mapping[str, Any]) -> NimbusMachine:
        price, pool = cloud.price_of(item["labels"]), item["labels"].get(cloud.POOL, "")
        target = cloud.ssh_target(item["ip"], "root", pool) if item["ip"] else None
        place = item["id"], item["private_ip"], item["ip"], target, price.known_total
        return NimbusMachine(*place, state=item["state"], pool=pool)

    def _offer(self, item: Mapping[str, Any]) -> CloudOffer:
        price = Price(item["hourly"], item["disk_hourly"], item["address_hourly"])
        return CloudOffer(
            item["name"], price.total, item["vcpus"], item["memory_gb"], kind=item["name"], parts=price, price="live"
        )

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call; what was not answered is repeated, which is safe: names are unique, and deleting is final."""
        content = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        action = f"{method} {path.partition('?')[0]}"
        for last in [False] * (_TRIES - 1) + [True]:
            try:
                with urlopen(Request(f"{self.url}/v1/{path}", content, headers, method=method), timeout=30) as answer:
                    return json.loads(answer.read() or b"null")
            except HTTPError as exc:
                kind = _KINDS.get(exc.code, "server" if exc.code >= 500 else "other")
                refused = CloudRefused(action, str(exc.code), exc.read().decode(errors="replace"), self.url, kind)
                exc.close()
            except (OSError, HTTPException, ValueError) as exc:
                refused = CloudRefused(action, type(exc).__name__, str(exc), self.url, "server")
            if last or not refused.unanswered:
                raise refused
            time.sleep(self.poll)
        raise AssertionError("never reached")


class NimbusLease(Lease):
    """The servers of an open pool."""

    def __init__(self, provider: Nimbus, ledger: Ledger) -> None:
        super().__init__(provider, ledger.pool, ledger=ledger)
        self._nimbus, self._ledger = provider, ledger

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> list[NimbusMachine]:
        return self._nimbus.launch(self._ledger, spec, count, timeout, report)

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        listed = self._nimbus.listed("servers", self.pool)
        found: dict[str, NimbusMachine] = {item["id"]: self._nimbus.machine(item) for item in listed}
        return [found.get(machine.id) or NimbusMachine(machine.id, state="deleted") for machine in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            self._nimbus.delete("server", machine.id)
            if machine.id not in cloud.ends(self._ledger.history):
                cloud.note_end(self._ledger, machine.id, time.time())
                cloud.forget(cloud.make_keys(self._ledger.directory), [machine.public_ip or ""])


def _owns(claim: Claim, kind: str, item: Mapping[str, Any]) -> bool:
    """A server is proven by the key that it was made with, which cannot be changed; a key by its name."""
    return claim.owns(kind, item["id"], item["labels"], item["key"] if kind == "server" else item["name"])


def _leftover(kind: str, item: Mapping[str, Any], claim: Claim) -> Leftover:
    server = kind == "server"
    foreign = "" if _owns(claim, kind, item) else cloud.remark(claim.pool, [item["id"]], _command([item["id"]]))
    cost = cloud.price_of(item["labels"]).known_total if server and item["state"] != "ending" else 0.0
    detail = f"{item['type']}, {item['state']}" if server else ""
    expires = cloud.expiry(item["labels"])
    return Leftover(claim.pool, item["id"], "machine" if server else kind, detail, cost, expires, foreign)


def _bill(id: str, item: Mapping[str, Any] | None, history: History) -> Bill:
    """From the ledger, or, where there is none, from what the cloud says of a server that was still there."""
    made, noted = history.made("server").get(id), cloud.ends(history).get(id)
    kind = made.data["type"] if made is not None else item["type"] if item is not None else ""
    began = item["created"] if item is not None else made.time if made is not None else 0.0
    price = cloud.price_of(item["labels"]) if item is not None else Price()
    price = Price.read(made.data["parts"]) if made is not None else price
    ended = noted.time if noted is not None else time.time()
    return Bill(id, kind, "", "on-demand", max(0.0, ended - began), price, began=began)


def _shape(item: Mapping[str, Any]) -> Shape:
    return Shape(item["name"], item["vcpus"], item["memory_gb"])


def _command(ids: Sequence[str]) -> str:
    return f"nimbus unlabel {' '.join(ids)} {cloud.POOL}"
