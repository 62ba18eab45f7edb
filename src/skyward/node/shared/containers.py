"""Shared collections that keep values: dict, set, counter, queue.

No clock, socket or thread here; keys are texts, values are bytes.
"""

from __future__ import annotations

from collections import deque

from skyward.node.shared.collection import Collection, Refused, Reply, Request, Surroundings, done, seconds

__all__ = ["Counter", "Dict", "Queue", "Set"]


class Dict(Collection):
    """Keys with values; each value has a number that grows with every change."""

    kind = "dict"

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._items: dict[str, tuple[int, bytes]] = {}
        self._count = 0

    def do_get(self, request: Request) -> list[Reply]:
        """[key] -> the number of the value and the value; 0 if there is none."""
        found = self._items.get(request.arguments[0])
        return [done(request, 0) if found is None else done(request, found[0], [found[1]])]

    def do_set(self, request: Request) -> list[Reply]:
        """[key], value"""
        self._put(request.arguments[0], request.values[0])
        return [done(request)]

    def do_update(self, request: Request) -> list[Reply]:
        """[keys], values: all of them at once."""
        for key, value in zip(request.arguments[0], request.values, strict=True):
            self._put(key, value)
        return [done(request)]

    def do_setdefault(self, request: Request) -> list[Reply]:
        """[key], value -> whether it was set; if not, the value that is there."""
        found = self._items.get(request.arguments[0])
        if found is not None:
            return [done(request, False, [found[1]])]
        self._put(request.arguments[0], request.values[0])
        return [done(request, True)]

    def do_swap(self, request: Request) -> list[Reply]:
        """[key, number], value -> whether it was set: only if the value that is there has this number."""
        key, number = request.arguments
        same = self._items.get(key, (0, b""))[0] == number
        if same:
            self._put(key, request.values[0])
        return [done(request, same)]

    def do_pop(self, request: Request) -> list[Reply]:
        """[key] -> whether it was there, and the value that was."""
        found = self._items.pop(request.arguments[0], None)
        if found is None:
            return [done(request, False)]
        self.size -= len(found[1]) + len(request.arguments[0])
        return [done(request, True, [found[1]])]

    def do_contains(self, request: Request) -> list[Reply]:
        """[key] -> whether it is there."""
        return [done(request, request.arguments[0] in self._items)]

    def do_len(self, request: Request) -> list[Reply]:
        """-> how many there are."""
        return [done(request, len(self._items))]

    def do_keys(self, request: Request) -> list[Reply]:
        """-> all keys, in the order in which they came."""
        return [done(request, list(self._items))]

    def do_items(self, request: Request) -> list[Reply]:
        """-> all keys, and all values in the same order."""
        return [done(request, list(self._items), [value for _, value in self._items.values()])]

    def do_clear(self, request: Request) -> list[Reply]:
        """Removes everything."""
        self._items.clear()
        self.size = 0
        return [done(request)]

    def _put(self, key: str, value: bytes) -> None:
        old = self._items.get(key)
        self.size += len(value) + (len(key) if old is None else -len(old[1]))
        self._count += 1
        self._items[key] = self._count, value


class Set(Collection):
    """Members, each of them once."""

    kind = "set"

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._members: dict[str, None] = {}

    def do_add(self, request: Request) -> list[Reply]:
        """[members] -> how many of them were new."""
        new = [key for key in dict.fromkeys(request.arguments[0]) if key not in self._members]
        self._members.update(dict.fromkeys(new))
        self.size += sum(map(len, new))
        return [done(request, len(new))]

    def do_discard(self, request: Request) -> list[Reply]:
        """[member] -> whether it was there."""
        there = request.arguments[0] in self._members
        if there:
            self._remove(request.arguments[0])
        return [done(request, there)]

    def do_pop(self, request: Request) -> list[Reply]:
        """-> a list of the member that came first, which is removed; empty if there is none."""
        found = next(iter(self._members), None)
        if found is None:
            return [done(request, [])]
        self._remove(found)
        return [done(request, [found])]

    def do_contains(self, request: Request) -> list[Reply]:
        """[member] -> whether it is there."""
        return [done(request, request.arguments[0] in self._members)]

    def do_len(self, request: Request) -> list[Reply]:
        """-> how many there are."""
        return [done(request, len(self._members))]

    def do_keys(self, request: Request) -> list[Reply]:
        """-> all members, in the order in which they came."""
        return [done(request, list(self._members))]

    def do_clear(self, request: Request) -> list[Reply]:
        """Removes everything."""
        self._members.clear()
        self.size = 0
        return [done(request)]

    def _remove(self, key: str) -> None:
        del self._members[key]
        self.size -= len(key)


class Counter(Collection):
    """A whole number."""

    kind = "counter"

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._value = 0

    def do_add(self, request: Request) -> list[Reply]:
        """[number] -> the new value."""
        self._value += request.arguments[0]
        return [done(request, self._value)]

    def do_set(self, request: Request) -> list[Reply]:
        """[number] -> the value before."""
        before, self._value = self._value, request.arguments[0]
        return [done(request, before)]


class Queue(Collection):
    """Values in the order in which they came, each of them for one asker."""

    kind = "queue"

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._values: deque[bytes] = deque()
        self._limit: int | None = None  # 0: none; None: nobody has said

    def do_put(self, request: Request) -> list[Reply]:
        """[limit], value; waits while the queue is full. The limit is 0 for none, None for whatever it is."""
        self._agree(request.arguments[0])
        if self._limit and len(self._values) >= self._limit:
            self.waiting.append(request)
            return []
        return [done(request), *self._add(request.values[0])]

    def do_get(self, request: Request) -> list[Reply]:
        """[limit] -> the value that came first; waits while there is none."""
        self._agree(request.arguments[0])
        if not self._values:
            self.waiting.append(request)
            return []
        value = self._values.popleft()
        self.size -= len(value)
        replies = [done(request, None, [value])]
        if self.waiting and self._limit and len(self._values) < self._limit:
            putter = self.waiting.popleft()  # whoever waits while there are values wants to put
            self._values.append(putter.values[0])
            self.size += len(putter.values[0])
            replies.append(done(putter))
        return replies

    def do_unget(self, request: Request) -> list[Reply]:
        """value: puts back in front what was given to somebody who did not wait any more."""
        return [done(request), *self._add(request.values[0], first=True)]

    def do_len(self, request: Request) -> list[Reply]:
        """-> how many values there are."""
        return [done(request, len(self._values))]

    def do_clear(self, request: Request) -> list[Reply]:
        """-> how many values were removed; whoever waits to put goes on."""
        count = len(self._values)
        if not count:
            return [done(request, 0)]  # whoever waits wants to get
        self._values.clear()
        self.size = 0
        replies = [done(request, count)]
        while self.waiting and (not self._limit or len(self._values) < self._limit):
            putter = self.waiting.popleft()
            replies += [done(putter), *self._add(putter.values[0])]
        return replies

    def late(self, request: Request) -> tuple[str, list[Reply]]:
        others = len(self.waiting) - 1
        also = f"; {others} others wait, too" if others > 0 else ""
        self.waiting.remove(request)
        within = seconds(request.timeout or 0)
        if request.values:
            return f"{self} was full for {within}: it has {len(self._values)} of {self._limit} items{also}.", []
        return f"{self} was empty for {within}{also}.", []

    def _agree(self, limit: int | None) -> None:
        if limit is None:
            return
        if self._limit is not None and limit != self._limit:
            raise Refused(
                "argument", f"{self} has maxsize={self._limit} already; say maxsize={self._limit}, or leave it out."
            )
        self._limit = limit

    def _add(self, value: bytes, *, first: bool = False) -> list[Reply]:
        if not self._values and self.waiting:
            return [done(self.waiting.popleft(), None, [value])]
        (self._values.appendleft if first else self._values.append)(value)
        self.size += len(value)
        return []
