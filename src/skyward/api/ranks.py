"""Which rank runs on which node: how many processes each node has, counted up node by node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

__all__ = ["Ranks"]


class Ranks:
    """The ranks of a pool whose nodes have `counts` processes each; a node that is missing has none."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self._firsts = tuple(accumulate(self.counts, initial=0))
        self.many = any(count > 1 for count in self.counts)
        """Whether a node has several: then its number alone does not name a rank."""

    def __len__(self) -> int:
        return self._firsts[-1]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Node and local rank of every rank."""
        return tuple((node, local) for node, count in enumerate(self.counts) for local in range(count))

    def rank(self, node: int, local_rank: int) -> int:
        """The rank of a node's process."""
        return self._firsts[node] + local_rank

    def on(self, node: int) -> range:
        """The ranks of a node."""
        return range(self._firsts[node], self._firsts[node + 1])
