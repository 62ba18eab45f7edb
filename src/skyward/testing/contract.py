"""The provider contract as tests to inherit. Plain asserts: pytest runs them but is not imported.

class TestNimbus(ProviderContract):
    @pytest.fixture
    def provider(self) -> Nimbus:
        return Nimbus(token="...")
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

from skyward import extensions
from skyward.api.provider import Lease, Machine, Offer, Provider
from skyward.api.spec import Spec
from skyward.machines import reaper
from skyward.machines.ledger import read, remove

__all__ = ["ProviderContract"]


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
