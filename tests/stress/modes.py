"""What is done to pools under stress: each mode is one round, repeated as long as there is time."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import skyward as sky
from skyward.errors import NodeLost, RefLost, TaskCrashed, TaskTimeout
from tests.stress import bodies
from tests.stress.faults import hogs, kill, pauses, pools_in_another_namespace
from tests.stress.trial import Failed, Trial, within

__all__ = ["MODES", "Mode"]

SHORT = (0.0, 0.001, 0.002, 0.005, 0.02)


def short(rng: random.Random, count: int) -> list[float]:
    """How long that many short bodies take."""
    return [rng.choice(SHORT) for _ in range(count)]


def cancel(t: Trial, futures: Sequence[Future[Any]], moment: float = 0.1) -> None:
    """Cancels calls: together at some moment, one after the other, or from two threads at once."""
    t.may_be_cancelled(futures)
    way = t.rng.choice(["together", "one by one", "two threads"])
    if way == "one by one":
        for future in futures:
            time.sleep(t.rng.uniform(0, moment / 10))
            future.cancel()
        return
    time.sleep(t.rng.uniform(0, moment))
    if way == "together":
        for future in futures:
            future.cancel()
        return
    threads = [threading.Thread(target=lambda: [future.cancel() for future in futures]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cancels(t: Trial) -> None:
    """Short printing calls, a third of them cancelled."""
    futures = t.speak(short(t.rng, 60))
    cancel(t, t.rng.sample(futures, 20))


def paused(t: Trial) -> None:
    """Slow calls, then many short ones that are sent ahead, while agents and runners stop for moments."""
    t.speak([t.rng.uniform(0.05, 0.3)] * t.slots)
    with pauses(t.processes, t.rng):
        futures = t.speak(short(t.rng, 100))
        if t.rng.random() < 0.5:
            cancel(t, t.rng.sample(futures, 20))
        t.check()


def mixed(t: Trial) -> None:
    """Long and short calls in any order; some of either are cancelled."""
    seconds = short(t.rng, 50) + [t.rng.uniform(0.05, 0.3) for _ in range(8)]
    t.rng.shuffle(seconds)
    futures = t.speak(seconds)
    cancel(t, t.rng.sample(futures, 12), moment=0.4)


def timeouts(t: Trial) -> None:
    """Time limits that meet the end of bodies, beside calls without one."""
    limit = t.rng.uniform(0.02, 0.06)
    t.speak([limit * t.rng.uniform(0.7, 1.3) for _ in range(10)], [TaskTimeout], timeout=limit)
    t.speak(short(t.rng, 20))


class Interrupted(Exception):
    """What the signal handler raises in the main thread, as Ctrl-C does."""


def interrupted(t: Trial, act: Callable[[], object]) -> None:
    """Does something that a signal breaks off, as Ctrl-C would."""
    armed = True

    def strike(number: int, frame: object) -> None:
        if armed:
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, strike)
    timer = threading.Timer(t.rng.uniform(0.02, 0.1), os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        try:
            act()
        finally:
            armed = False
    except Interrupted:
        pass
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def broadcasts(t: Trial) -> None:
    """Broadcasts broken off in the middle: by a rank that fails, a time limit, a signal; beside other calls."""
    t.speak(short(t.rng, 20))
    for _ in range(2):
        key, way = t.key(), t.rng.choice(["fails", "late", "signal"])
        for rank in range(t.pool.world_size):
            t.allow(f"{key}.{rank}")
        failing = t.rng.randrange(t.pool.world_size) if way == "fails" else None
        call = bodies.rank(t.log, key, t.rng.uniform(0.05, 0.2), failing)
        if way == "signal":
            interrupted(t, lambda call=call: call @ t.pool)
            continue
        if way == "late":
            call = call.with_timeout(t.rng.uniform(0.02, 0.2))
        try:
            within(t.limit, "a broadcast", lambda call=call: call @ t.pool)
        except (ValueError, TaskTimeout) as exc:
            if isinstance(exc, ValueError) != (way == "fails"):
                raise Failed(f"a broadcast that should end by {way!r} raised {exc!r}") from exc
    t.speak(short(t.rng, 20))


def streams(t: Trial) -> None:
    """Streams out, in, and both ways; closed, dropped or cancelled early by another thread than the one that reads."""
    endless, finite = iter(int, 1), iter(range(2000))
    keys = [t.key() for _ in range(4)]
    pause = t.rng.choice([0.0, 0.0005])
    opened = [
        bodies.count(t.log, keys[0], 100_000, pause) > t.pool,
        bodies.count(t.log, keys[1], 100_000, 0.0) > t.pool,
        bodies.squares(t.log, keys[2], endless) > t.pool,
    ]
    for key in keys[:3]:
        t.allow(key)
    summed = t.expect(keys[3], bodies.add(t.log, keys[3], finite) > t.pool, sum(range(2000)))
    if t.rng.random() < 0.3:
        cancel(t, [summed])
    readers = [(stream := future.result(t.limit), *_reader(stream)) for future in opened]
    time.sleep(t.rng.uniform(0, 0.1))
    for stream, thread, problems in t.rng.sample(readers, len(readers)):
        stream.close()
        thread.join(t.limit)
        if thread.is_alive():
            raise Failed(f"the reader of a closed stream did not end within {t.limit:g} s")
        if problems:
            raise Failed(f"the reader of a closed stream raised {problems[0]!r}") from problems[0]


def _reader(stream: Iterator[int]) -> tuple[threading.Thread, list[BaseException]]:
    problems: list[BaseException] = []

    def read() -> None:
        try:
            last = -1
            for item in stream:
                if item < last:
                    raise Failed(f"{item} came after {last}")
                last = item
        except BaseException as exc:
            problems.append(exc)

    thread = threading.Thread(target=read, name="stress reader", daemon=True)
    thread.start()
    return thread, problems


def runners_killed(t: Trial) -> None:
    """Runners die while calls run in them: what had begun is a crash, what had not runs once."""
    futures = t.speak(short(t.rng, 60), [TaskCrashed])
    if t.rng.random() < 0.5:
        cancel(t, t.rng.sample(futures, 10))
    time.sleep(t.rng.uniform(0, 0.1))
    for pid in t.rng.sample(t.runners, min(2, len(t.runners))):
        kill(pid)


def agents_killed(t: Trial) -> None:
    """An agent dies while calls run on its node: they run again, within their retries."""
    futures = t.speak(short(t.rng, 60), starts=2)
    if t.rng.random() < 0.5:
        cancel(t, t.rng.sample(futures, 10))
    time.sleep(t.rng.uniform(0, 0.1))
    kill(t.rng.choice(t.agents()))


def kept(t: Trial) -> None:
    """Results that stay on nodes, and calls that take them: all are right."""
    keys, refs = _keep(t)
    _take(t, keys, refs)
    t.check()
    for key, ref in zip(keys, refs, strict=True):
        if within(t.limit, "a kept result", ref.get)[:8] != (key.encode() * 8)[:8]:
            raise Failed(f"the kept result of {key} came home as another")
        if t.rng.random() < 0.5:
            ref.drop()


def kept_under_kills(t: Trial) -> None:
    """The same while agents and runners die: what is lost is made again, or named as lost."""
    keys, refs = _keep(t)
    _take(t, keys, refs, [RefLost, NodeLost, TaskCrashed])
    for _ in range(t.rng.randint(1, 4)):
        time.sleep(t.rng.uniform(0, 0.2))
        kill(t.rng.choice(t.processes()))
    t.settled()
    for key, ref in zip(keys, refs, strict=True):
        try:
            value = within(t.limit, "a kept result", ref.get)
        except (RefLost, NodeLost, TaskCrashed):
            continue
        if value[:8] != (key.encode() * 8)[:8]:
            raise Failed(f"the kept result of {key} came home as another")


def _keep(t: Trial) -> tuple[list[str], list[Any]]:
    keys = [t.key() for _ in range(4)]
    size = t.rng.choice([100, 50_000, 2_000_000])
    for key in keys:
        t.allow(key, starts=20)  # a result that was lost with its node is made again
    calls = [bodies.produce(t.log, key, size).keep() for key in keys]
    return keys, [within(t.limit, "a kept call", lambda call=call: call >> t.pool) for call in calls]


def _take(t: Trial, keys: list[str], refs: list[Any], may_raise: Sequence[type[BaseException]] = ()) -> None:
    for _ in range(10):
        chosen = t.rng.sample(range(len(refs)), t.rng.randint(1, 3))
        key, begins = t.key(), [(keys[i].encode() * 8)[:8] for i in chosen]
        call = bodies.take(t.log, key, *(refs[i] for i in chosen))
        t.expect(key, call > t.pool, begins, may_raise, starts=4)


def collections(t: Trial) -> None:
    """Queue, lock, counter and dict used by many bodies at once, while processes stop for moments."""
    name = t.key()
    keys = [t.key() for _ in range(20)]
    with pauses(t.processes, t.rng):
        for key in keys:
            t.expect(key, bodies.share(t.log, key, name) > t.pool, key)
        queue = t.pool.queue(f"{name}-queue")
        came = [within(t.limit, "an item of a queue", lambda: queue.get(timeout=t.limit)) for _ in keys]
        t.check()
    if sorted(came) != sorted(keys):
        raise Failed(f"{len(keys)} items were put, these came: {sorted(came)}")
    counted = t.pool.counter(f"{name}-counter").value, t.pool.dict(f"{name}-dict")["count"]
    if counted != (len(keys), len(keys)):
        raise Failed(f"{len(keys)} bodies counted up, counter and dict say {counted}")


def imports(t: Trial) -> None:
    """A call is cancelled while it imports pandas; later calls find no half-imported package."""
    keys = [t.key() for _ in range(8)]
    first = [t.expect(key, bodies.import_pandas(t.log, key) > t.pool, 6, [TaskCrashed]) for key in keys[:2]]
    cancel(t, [t.rng.choice(first)], moment=0.5)
    for key in keys[2:]:
        t.expect(key, bodies.import_pandas(t.log, key) > t.pool, 6)


@dataclass(frozen=True)
class Mode:
    """A kind of round, the pools that it needs, and what goes on beside it."""

    name: str
    round: Callable[[Trial], None]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    pools: int = 1
    rounds: int = 500
    """Rounds after which the pools are closed and others opened: a keeper restarts an agent only so often."""
    rough: tuple[type[BaseException], ...] = ()
    beside: Callable[[], AbstractContextManager[None]] = nullcontext


MODES = [
    Mode("cancels", cancels),
    Mode("cancels in threads", cancels, {"concurrency": 4}),
    Mode("cancels in processes", cancels, {"worker": sky.Worker(3, executor="process")}),
    Mode("cancels beside hogs", cancels, {"concurrency": 2}, beside=hogs),
    Mode("cancels in two pools", cancels, pools=2),
    Mode("pauses", paused),
    Mode("pauses in threads", paused, {"concurrency": 3}, beside=hogs),
    Mode("long and short", mixed, {"concurrency": 2}),
    Mode("time limits", timeouts, {"concurrency": 2}),
    Mode("broadcasts", broadcasts),
    Mode("broadcasts to ranks", broadcasts, {"processes_per_node": 2}),
    Mode("cancels in ranks", cancels, {"processes_per_node": 2, "concurrency": 2}),
    Mode("streams", streams, {"concurrency": 4}),
    Mode("runners killed", runners_killed, {"worker": sky.Worker(2, executor="process")}, rough=(TaskCrashed,)),
    Mode("agents killed", agents_killed, rounds=8, rough=(NodeLost,)),
    Mode("kept results", kept, {"concurrency": 2}),
    Mode("kept results beside another container", kept, pools=2, beside=pools_in_another_namespace),
    Mode("kept results under kills", kept_under_kills, rounds=4, rough=(NodeLost, TaskCrashed)),
    Mode("collections", collections, {"concurrency": 2}),
    Mode("imports", imports, {"concurrency": 2}, rounds=1),
]
