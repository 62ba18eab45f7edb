"""Who may take which place of a pool: a pure bookkeeping of places, tokens and the keys that they are bound to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from skyward.node.join import token

__all__ = ["Places", "Refused"]


class Refused(Exception):
    """Somebody is not let in; if it knows the pool's secret, the user is told of it. It may try `again` for a while."""

    def __init__(self, why: str, known: bool, again: bool = False) -> None:
        super().__init__(why, known, again)
        self.why, self.known, self.again = why, known, again


class Places:
    """The places of a pool. One is open until somebody takes it or its time is over, then bound to a key."""

    def __init__(self, pool: str, secret: str) -> None:
        self._pool, self._secret = pool, secret
        self._open: list[int] = []
        self._bound: dict[int, str] = {}
        self._retired: set[int] = set()

    def open(self, places: Iterable[int]) -> None:
        """These may be taken from now on; one that is bound is bound to whoever takes it next."""
        for place in places:
            self._bound.pop(place, None)
            self._retired.discard(place)
            if place not in self._open:
                self._open.append(place)

    def close(self, places: Iterable[int]) -> None:
        """These may not be taken any more if nobody has taken them yet: their time is over."""
        for place in places:
            if place in self._open:
                self._open.remove(place)

    def retire(self, place: int) -> None:
        """Whoever has this place may not come back either."""
        self._retired.add(place)

    def admit(self, place: int | None, proof: str, key: str) -> int:
        """The place of somebody who asks for it; raises Refused. Its first use binds a place to the key."""
        if not hmac.compare_digest(proof.encode(), token(self._secret, self._pool, place).encode()):
            raise Refused("it does not know this pool's secret", False)
        digest = hashlib.sha256(key.encode()).hexdigest()
        mine = next((known for known, bound in self._bound.items() if hmac.compare_digest(bound, digest)), None)
        if mine is not None and place in (None, mine):
            if mine in self._retired:
                raise Refused(f"place {mine} was given up", False)
            return mine
        if place is None:
            if not self._open:
                raise Refused("every place is taken", True, again=True)
            place = self._open[0]
        elif place in self._bound:
            raise Refused(f"place {place} is taken by another machine", True)
        elif place not in self._open:
            raise Refused(f"there is no place {place}, or the time to take it is over", True)
        self._open.remove(place)
        self._bound[place] = digest
        return place
