"""Who may take which place of a pool that machines join."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from skyward.node.join import token

__all__ = ["Places", "Refused"]


_ABSENT = 20.0  # seconds; machines whose connection breaks are back sooner


class Refused(Exception):
    """The user hears of it only if the joiner knew the secret.

    It may retry if `again`. `instead_of`: the machine it replaces.
    """

    def __init__(self, why: str, known: bool, again: bool = False, instead_of: int | None = None) -> None:
        super().__init__(why, known, again, instead_of)
        self.why, self.known, self.again, self.instead_of = why, known, again, instead_of


class Places:
    """Open until taken or expired, then bound to a key."""

    def __init__(self, pool: str, secret: str, bound: Mapping[int, str] | None = None) -> None:
        self._pool, self._secret = pool, secret
        self._open: list[int] = []
        self._bound = dict(bound or {})
        self._retired: set[int] = set()
        self._used: set[int] = set()
        self._followers: set[str] = set()

    def open(self, places: Iterable[int]) -> None:
        """Reopening a bound place binds it to its next taker."""
        for place in places:
            self._bound.pop(place, None)
            self._retired.discard(place)
            self._used.discard(place)
            if place not in self._open:
                self._open.append(place)

    def close(self, places: Iterable[int]) -> None:
        for place in places:
            if place in self._open:
                self._open.remove(place)

    def bound(self, place: int) -> str:
        return self._bound[place]

    def retire(self, place: int) -> None:
        self._retired.add(place)

    def use(self, places: Iterable[int]) -> None:
        self._used.update(places)

    def is_used(self, place: int) -> bool:
        return place in self._used

    def had_by(self, key: str) -> int | None:
        digest = _digest(key)
        return next((place for place, bound in self._bound.items() if hmac.compare_digest(bound, digest)), None)

    def admit(self, place: int | None, proof: str, key: str, away: Mapping[int, float] | None = None) -> int:
        """Binds a place to the key; raises Refused.

        `away`: seconds since an absent machine left, if interchangeable.
        """
        if not hmac.compare_digest(proof.encode(), token(self._secret, self._pool, place).encode()):
            raise Refused("it does not know this pool's secret", False)
        mine = self.had_by(key)
        if mine is not None and place in (None, mine):
            if mine in self._retired:
                raise Refused(f"place {mine} was given up", False)
            return mine
        place = self._asked(place) if away is None else self._any(place, _digest(key), away)
        if place in self._open:
            self._open.remove(place)
        self._bound[place] = _digest(key)
        return place

    def _asked(self, place: int | None) -> int:
        if place is None:
            if not self._open:
                raise Refused("every place is taken", True, again=True)
            return self._open[0]
        if place in self._bound:
            raise Refused(f"place {place} is taken by another machine", True)
        if place not in self._open:
            raise Refused(f"there is no place {place}, or the time to take it is over", True)
        return place

    def _any(self, place: int | None, digest: str, away: Mapping[int, float]) -> int:
        """The requested place or another; that of an absent machine only if unused."""
        if place in self._open:
            return place
        if place in self._bound and place not in away and place not in self._retired:
            raise Refused(f"place {place} is taken by another machine", True)
        gone = {*self._retired, *(known for known, seconds in away.items() if seconds > _ABSENT)}
        lost = [known for known in self._bound if known in gone and place in (None, known)]
        unused = [known for known in lost if known not in self._used and known not in self._retired]
        if found := [*self._open, *unused]:
            return found[0]
        used = [known for known in lost if known not in self._retired]
        if used and digest not in self._followers:  # nobody has more than one machine given up
            self._followers.add(digest)
            raise Refused(f"the machine of place {used[0]} is being given up", False, again=True, instead_of=used[0])
        # the user is told, unless there is a place soon: that of a machine that is given up, or may be
        raise Refused("every place is taken", not (lost or away or digest in self._followers), again=True)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
