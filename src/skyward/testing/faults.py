"""Faults to inject into calls of an emulated API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

__all__ = ["Call", "Fault", "Faults", "Mode"]

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
