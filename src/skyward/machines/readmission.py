"""When a provider is asked to let this computer in again, and what the user is told. Knows no clock and no provider.

A cloud that lets in the caller's address only shuts out a laptop that has changed networks. Machines that do not answer
are the sign of it: whoever looks after them says so here every few seconds.
"""

from __future__ import annotations

from skyward.api.provider import Admission
from skyward.errors import SkywardError

__all__ = ["Readmission"]

_FIRST = 4.0  # a connection that breaks is usually back by then
_OFTEN, _RARELY = 10.0, 30.0
_SOON = 60.0
_OVER = 60.0  # so long after the last question, a silence is another one
_TELL = 30.0


class Readmission:
    """One silence after the other; not thread-safe."""

    def __init__(self) -> None:
        self._began = self._seen = float("-inf")
        self._asked: float | None = None
        self._told = False

    def due(self, now: float) -> bool:
        """Machines do not answer at this moment: whether the provider is asked now."""
        if now - self._seen > _OVER:
            self._began, self._asked, self._told = now, None, False
        self._seen = now
        if self._asked is None:
            due = now - self._began >= _FIRST
        else:
            due = now - self._asked >= (_OFTEN if now - self._began < _SOON else _RARELY)
        if due:
            self._asked = now
        return due

    def answered(self, admission: Admission, now: float) -> str:
        """What the user is told after the provider has looked who is let in."""
        if admission.changed:
            self._told = False
            return admission.changed
        return self._once(admission.allowed, now)

    def failed(self, error: SkywardError, now: float) -> str:
        """What the user is told after the provider could not look, or may not; this computer may be offline."""
        return self._once(str(error), now)

    def _once(self, text: str, now: float) -> str:
        if not text or self._told or now - self._began < _TELL:
            return ""
        self._told = True
        return f"machines do not answer. {text}"
