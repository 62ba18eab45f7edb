"""How long what a keeper started may live: who was last heard, until when, and which word about that counts.

      agent --TermsSlot--> shared page --> TermsPage --> keeper: over?

Each agent writes its own slot, and wakes the keeper when the end changes; when the client was heard is read when it
matters. Slots have a checksum: one that a dying process left half-written is not read.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce

__all__ = ["Terms", "TermsPage", "TermsSlot"]

_VALUES = struct.Struct("=dd?QQ")
_SUM = struct.Struct("=I")
_SIZE = 64

Memory = mmap.mmap | bytearray


@dataclass(frozen=True)
class Terms:
    """Times are of the machine's monotonic clock. Pure."""

    heard: float = 0.0
    """When the client, or a detached run's steward, was last heard."""
    deadline: float = math.inf
    ending: bool = False
    """Whether somebody entitled has said that it is over."""
    epoch: int = 0
    """Which start of a run's driver this is about; only the run's steward raises it. 0: no detached run."""
    serial: int = 0
    """Of the words in one epoch the last counts, whether it shortens or lengthens."""

    def hear(self, when: float) -> Terms:
        """Never makes it longer ago: a silent link gives an older time than the steward."""
        return replace(self, heard=max(self.heard, when))

    def take(self, other: Terms) -> Terms:
        """The later epoch, in it the later serial; what is ending keeps ending."""
        last = other if (other.epoch, other.serial) > (self.epoch, self.serial) else self
        return replace(last, heard=max(self.heard, other.heard), ending=self.ending or other.ending)

    def is_stale(self, epoch: int) -> bool:
        """Whether the speaker for this epoch has been replaced."""
        return epoch < self.epoch

    def over(self, now: float, lease: float) -> str:
        """Why everything ends now; empty while it does not. Without a lease nobody needs to be heard."""
        if self.ending:
            return "end"
        if now >= self.deadline:
            return "deadline"
        return "lease" if 0 < lease < now - self.heard else ""


class TermsPage:
    """Memory that a keeper shares with its agents, a slot for each. Made before they are forked."""

    def __init__(self, nodes: int) -> None:
        self._memory = mmap.mmap(-1, max(mmap.PAGESIZE, _SIZE * nodes))
        self._known = [Terms()] * nodes

    def slot(self, index: int, changed: Callable[[], object] = bool) -> TermsSlot:
        return TermsSlot(self._memory, index, changed)

    def read(self) -> Terms:
        self._known = [read_slot(self._memory, index) or known for index, known in enumerate(self._known)]
        return merged(self._known)


class TermsSlot:
    """An agent's part of the page; a restarted agent continues from what its predecessor wrote."""

    def __init__(self, memory: Memory, index: int, changed: Callable[[], object] = bool) -> None:
        self._memory, self._index, self._changed = memory, index, changed
        self.terms = read_slot(memory, index) or Terms()

    def hear(self, when: float) -> None:
        self._write(self.terms.hear(when))

    def take(self, terms: Terms) -> None:
        self._write(self.terms.take(terms))
        self._changed()

    def _write(self, terms: Terms) -> None:
        if terms != self.terms:
            self.terms = terms
            packed = _VALUES.pack(terms.heard, terms.deadline, terms.ending, terms.epoch, terms.serial)
            start = _SIZE * self._index
            self._memory[start : start + len(packed) + _SUM.size] = packed + _SUM.pack(zlib.crc32(packed))


def merged(all: Iterable[Terms]) -> Terms:
    return reduce(Terms.take, all, Terms())


def read_slot(memory: Memory, index: int) -> Terms | None:
    start = _SIZE * index
    packed = memory[start : start + _VALUES.size]
    (checksum,) = _SUM.unpack_from(memory, start + _VALUES.size)
    if zlib.crc32(packed) != checksum:
        return None  # nothing was written yet, or it is being written
    return Terms(*_VALUES.unpack(packed))
