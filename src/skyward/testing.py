"""For tests of providers: their contract as tests to inherit, faults for an emulated API, and simulated GPUs.

Plain asserts: pytest runs them but is not imported.

class TestNimbus(ProviderContract):
    @pytest.fixture
    def provider(self) -> Nimbus:
        return Nimbus(token="...")
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import NAMESPACE_OID, uuid5

from skyward import extensions
from skyward.api.provider import Lease, Machine, Offer, Provider
from skyward.api.spec import Spec
from skyward.machines import reaper
from skyward.machines.ledger import read, remove

__all__ = [
    "Call",
    "Fault",
    "Faults",
    "Mode",
    "ProviderContract",
    "nvidia_smi",
]


class ProviderContract:
    """A subclass defines the fixture `provider` and may override what is requested of it."""

    spec = Spec()
    count = 2
    timeout = 60.0

    def test_it_is_a_frozen_value(self, provider: Provider) -> None:
        assert provider == copy.copy(provider)
        assert hash(provider) == hash(copy.copy(provider))
        for item in fields(provider):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            try:
                setattr(provider, item.name, None)
            except FrozenInstanceError:
                continue
            raise AssertionError(f"{item.name} can be changed; write @dataclass(frozen=True)")

    def test_offers_have_names_and_prices_and_create_nothing(self, provider: Provider) -> None:
        before = provider.find()
        offers = list(provider.offers(self.spec, self.count))
        assert offers, "there is nothing on offer; change `spec` to something that the provider has"
        for offer in offers:
            assert isinstance(offer, Offer)
            assert offer.hourly_cost >= 0, f"{offer} has a price below 0"
        assert provider.find() == before, "asking for offers has created something"

    def test_machines_run_and_can_be_reached(self, provider: Provider, tmp_path: Path, monkeypatch: Any) -> None:
        with self._pool(provider, tmp_path, monkeypatch) as held:
            assert held.pool == self.pool
            assert len({machine.id for machine in held.machines}) == self.count, "ids differ, and there are `count`"
            for machine in held.machines:
                assert machine.is_local == provider.access.local, "access.local says what machines say"
                assert machine.ssh is None or machine.ssh.host, f"{machine.id} has no address"
            fresh = held.refresh(held.machines)
            assert [machine.id for machine in fresh] == [machine.id for machine in held.machines], "the same order"
            assert not any(machine.gone for machine in fresh), "machines that run are not gone"

    def test_everything_is_given_back_and_it_may_be_repeated(
        self, provider: Provider, tmp_path: Path, monkeypatch: Any
    ) -> None:
        with self._pool(provider, tmp_path, monkeypatch) as held:
            if provider.rented:
                found = {item.id for item in self._left(provider) if item.kind == "machine"}
                assert found == {machine.id for machine in held.machines}, "find lists the machines of a pool"
            held.close(self._ignore)
            assert self._left(provider) == []
            assert read(self.pool) is None, "the ledger goes with the pool"
            held.close(self._ignore)
            provider.give_back(self.pool, self._ignore)

    def test_a_pool_whose_process_died_is_found_and_ended_by_another(
        self, provider: Provider, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """What `sky ps`, `sky down` and the watchdog do."""
        if not provider.rented:
            return
        assert provider.name in extensions.found("providers"), "its entry point has another name, or is missing"
        with self._pool(provider, tmp_path, monkeypatch) as held:
            written = read(self.pool)
            assert written is not None, "a provider that rents machines writes a ledger"
            assert written.metadata.get("provider") == provider.name, "the ledger says whose it is"
            assert written.metadata.get("expires"), "the ledger says when the pool's time is over"
            (item,) = [item for item in reaper.pools([provider]) if item.pool == self.pool]
            assert item.condition == "in use", "the lease holds the ledger"
            held.let_go()
            (outcome,) = reaper.down([provider], [self.pool], really=True)
            assert (outcome.found.condition, outcome.did) == ("abandoned", "ended"), outcome.why
            assert self._left(provider) == []

    def test_a_pool_without_a_ledger_is_found_and_ended(
        self, provider: Provider, tmp_path: Path, monkeypatch: Any
    ) -> None:
        if not provider.rented:
            return
        with self._pool(provider, tmp_path, monkeypatch) as held:
            held.let_go()
            remove(self.pool)
            (item,) = [item for item in reaper.pools([provider]) if item.pool == self.pool]
            assert item.condition == "elsewhere"
            provider.give_back(self.pool, self._ignore)
            assert self._left(provider) == []

    def test_an_interrupted_acquire_leaves_nothing(self, provider: Provider, tmp_path: Path, monkeypatch: Any) -> None:
        def interrupt(text: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
        try:
            held = provider.acquire(self.spec, self.pool, self.count, self.timeout, interrupt)
        except KeyboardInterrupt:
            assert self._left(provider) == []
            assert read(self.pool) is None
        else:  # it does not report anything
            held.close(self._ignore)

    def test_an_open_pool_gets_more_machines_and_loses_some(
        self, provider: Provider, tmp_path: Path, monkeypatch: Any
    ) -> None:
        if not provider.elastic:
            return
        with self._pool(provider, tmp_path, monkeypatch) as held:
            (fresh,) = held.more(self.spec, 1, self.timeout, self._ignore)
            assert fresh.id not in {machine.id for machine in held.machines}
            held.terminate([fresh])
            held.terminate([fresh])  # silent about what is gone already
            self._wait_gone(held, fresh)
            assert not any(machine.gone for machine in held.refresh(held.machines)), "the others are still there"

    @property
    def pool(self) -> str:
        return f"contract-{type(self).__name__.lower()}"

    @contextmanager
    def _pool(self, provider: Provider, tmp_path: Path, monkeypatch: Any) -> Generator[Lease]:
        monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
        held = provider.acquire(self.spec, self.pool, self.count, self.timeout, self._ignore)
        try:
            yield held
        finally:
            held.close(self._ignore)

    def _left(self, provider: Provider) -> list[Any]:
        return [item for item in provider.find() if item.pool == self.pool]

    def _wait_gone(self, held: Lease, machine: Machine) -> None:
        deadline = time.monotonic() + self.timeout
        while not held.refresh([machine])[0].gone:
            assert time.monotonic() < deadline, f"{machine.id} was terminated, and is not gone"
            time.sleep(0.1)

    def _ignore(self, text: str) -> None:
        """Nobody reads what a provider reports."""


# Faults to inject into calls of an emulated API.


Mode = Literal[
    "refuse",  # not carried out; an error is answered
    "fail",  # carried out; an error is answered all the same
    "lose",  # carried out; the line is cut before the answer
    "cut",  # not carried out; the line is cut
    "garble",  # carried out; what is answered goes through `garble`
]

_STATUS = {
    "RequestLimitExceeded": 503,
    "ThrottlingException": 400,
    "InternalError": 500,
    "ServiceUnavailable": 503,
    "Unavailable": 503,
    "UnauthorizedOperation": 403,
    "AuthFailure": 401,
}


@dataclass(frozen=True)
class Call:
    number: int
    service: str
    action: str
    region: str
    params: Mapping[str, str]
    time: float
    outcome: str = ""


@dataclass
class Fault:
    """Applies to matching calls, `times` of them (-1: all), after `skip` successful ones."""

    action: str = "*"
    code: str = "InternalError"
    mode: Mode = "refuse"
    times: int = 1
    skip: int = 0
    where: Callable[[Call], bool] | None = None
    message: str = "made to fail by the test"
    status: int = 0
    garble: Callable[[bytes], bytes] = lambda body: body[: len(body) // 2]
    used: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.status = self.status or _STATUS.get(self.code, 400)

    def matches(self, call: Call) -> bool:
        return fnmatchcase(call.action, self.action) and (self.where is None or self.where(call))


class Faults:
    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = list(faults)
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def due(self, call: Call) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.matches(call):
                    if fault.skip > 0:
                        fault.skip -= 1
                    elif fault.times < 0 or fault.used < fault.times:
                        fault.used += 1
                        return fault
        return None


# Simulated GPUs of a test cloud's machines: a fake nvidia-smi.


# What drivers call the GPUs that EC2 names otherwise.
_PRODUCTS = {
    "A100": "NVIDIA A100-SXM4-{size}GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "RTX PRO Server 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "T4": "Tesla T4",
    "T4g": "NVIDIA T4G",
    "V100": "Tesla V100-SXM2-{size}GB",
}


class Instance(Protocol):
    """A machine of a test cloud: its id and EC2 type, such as g4dn.xlarge."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...


def nvidia_smi(instance: Instance) -> str | None:
    """A program that lists the GPUs of this EC2 type; None if it has no NVIDIA GPU. Put it on the PATH of the host
    behind the machine. It answers `nvidia-smi -L` and `--query-gpu=uuid,memory.total`.
    """
    found = _described(instance.kind)
    if found is None:
        return None
    name, count, mebibytes = found
    product = _PRODUCTS.get(name, f"NVIDIA {name}").format(size=round(mebibytes / 1024))
    uuids = [f"GPU-{uuid5(NAMESPACE_OID, f'{instance.id}/{number}')}" for number in range(count)]
    listing = "\n".join(f"GPU {number}: {product} (UUID: {uuid})" for number, uuid in enumerate(uuids))
    memory = "\n".join(f"{uuid}, {mebibytes}" for uuid in uuids)
    return (
        "#!/bin/sh\n# stands in for the driver's program; there is no GPU\n"
        f"case $1 in\n-L) cat <<'END'\n{listing}\nEND\n;;\n"
        f"--query-gpu=uuid,memory.total) cat <<'END'\n{memory}\nEND\n;;\n"
        '*) echo "the stand-in for nvidia-smi does not know $*" >&2; exit 2;;\nesac\n'
    )


def _described(kind: str) -> tuple[str, int, int] | None:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    types: dict[str, Any] = INSTANCE_TYPES
    gpus: list[dict[str, Any]] = types.get(kind, {}).get("GpuInfo", {}).get("Gpus", [])
    for gpu in gpus:
        if gpu.get("Manufacturer") == "NVIDIA" and gpu.get("Count"):
            return str(gpu["Name"]), int(gpu["Count"]), int(gpu["MemoryInfo"]["SizeInMiB"])
    return None
