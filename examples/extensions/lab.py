"""A provider: the machines of a lab, from a directory that everybody shares. Whoever takes one leaves a file there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyward.api.provider import Lease, Leftover, Machine, Offer, Provider, Report
from skyward.api.shell import Access, SshTarget
from skyward.api.spec import Spec
from skyward.errors import NoCapacity, NotGivenBack
from skyward.machines.ledger import Ledger, given_back
from skyward.machines.offers import wish

__all__ = ["Lab"]


@dataclass(frozen=True)
class Lab(Provider):
    """Machines of the lab: `inventory` has a file NAME.json for each, with what ssh needs to know of it."""

    inventory: str = os.environ.get("LAB_INVENTORY", "/srv/lab")

    @property
    def rented(self) -> bool:
        return True

    @property
    def access(self) -> Access:
        return Access(lease=300)

    def offers(self, spec: Spec, count: int) -> list[Offer]:
        return [Offer(f"{len(self._free())} machines of the lab")]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        expires = time.time() + spec.ttl
        ledger = Ledger.start(pool, {"provider": self.name, "inventory": self.inventory, "expires": expires})
        lease = Lease(self, pool, ledger=ledger)
        try:
            taken: list[str] = []
            for name in self._free():
                if len(taken) < count and self._take(ledger, name, expires):
                    taken.append(name)
                    report(f"{len(taken)} of {count} machines of the lab are ours")
            if len(taken) < count:
                raise NoCapacity(wish(spec), [f"{count} machines: only {len(taken)} are free"])
            lease.machines = tuple(self._machine(name) for name in taken)
            return lease
        except BaseException:
            lease.close(report)
            raise

    def give_back(self, pool: str, report: Report) -> str | None:
        with given_back(pool) as ledger:
            mine = [item.id for item in self.find() if item.pool == pool]
            for name in mine:
                self._file(name, "taken").unlink(missing_ok=True)
            left = [item.id for item in self.find() if item.pool == pool]
            if left:
                raise NotGivenBack(pool, self.inventory, left, 0.0, "Their files cannot be removed.")
            if ledger is not None:
                ledger.gone("machine", *mine)
        return f"machines given back: {', '.join(mine)}" if mine else None

    def find(self) -> list[Leftover]:
        names = sorted(path.stem for path in Path(self.inventory).glob("*.taken"))
        entries = [(name, json.loads(self._file(name, "taken").read_text())) for name in names]
        return [Leftover(entry["pool"], name, expires=entry["expires"]) for name, entry in entries]

    def reopened(self, metadata: Mapping[str, Any]) -> Lab:
        return replace(self, inventory=metadata.get("inventory") or self.inventory)

    def _free(self) -> list[str]:
        names = sorted(path.stem for path in Path(self.inventory).glob("*.json"))
        return [name for name in names if not self._file(name, "taken").exists()]

    def _take(self, ledger: Ledger, name: str, expires: float) -> bool:
        call = ledger.intent("machine", name=name)  # on disk before anything is created
        entry = json.dumps({"pool": ledger.pool, "expires": expires})
        draft = self._file(name, f"{os.getpid()}.draft")
        draft.write_text(entry)
        try:
            os.link(draft, self._file(name, "taken"))  # one of many wins, and nobody sees half a file
        except FileExistsError:
            ledger.refused(call, "machine", "somebody else was faster")
            return False
        finally:
            draft.unlink()
        ledger.answer(call, "machine", name)
        return True

    def _machine(self, name: str) -> Machine:
        return Machine(name, ssh=SshTarget(**json.loads(self._file(name, "json").read_text())))

    def _file(self, name: str, kind: str) -> Path:
        return Path(self.inventory) / f"{name}.{kind}"
