"""Whether the ranks of a broadcast make progress, and what to say if not: pure functions.

                           waits in a collective, uses no CPU       uses no CPU          uses CPU
    every other rank       stuck                                    alone, if some       working
                                                                    rank has returned

*Stuck*: every rank that has not returned waits in a collective and none uses CPU. *Alone*: ranks have returned and the
others do nothing that can be seen, such as a download.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from skyward import events
from skyward.api.spec import Ranks
from skyward.api.stacks import Frame, Stack, Stacks
from skyward.client.actions import Emit, Post, Stall, StallAction
from skyward.errors import Stalled
from skyward.node.protocol import Body, ClientToAgent, CodeFrames, Facts

if TYPE_CHECKING:
    from skyward.client.call import Call

__all__ = [
    "Collective",
    "Finding",
    "Rank",
    "StallWatch",
    "Surveys",
    "cause",
    "find",
    "frames_of",
    "judge",
    "sentence",
    "stacks",
]


Finding = Literal["going on", "alone", "stuck"]

_IDLE_SHARE = 0.02  # of a core; frameworks have threads that say now and then that they are alive


@dataclass(frozen=True)
class Rank:
    rank: int
    node: int
    returned: bool = False
    stack: Stack | None = None
    helpers: tuple[tuple[Frame, ...], ...] = ()
    cpu: float | None = None
    collectives: int | None = None
    entered: bool = False
    shard: tuple[int, ...] | None = None
    """What sky.shard gave it, if parts differ: length of the whole, number of parts, length of its part."""
    accelerators: bool = False

    @property
    def idle(self) -> bool:
        return self.stack is not None and self.cpu is not None and self.cpu < _IDLE_SHARE and not self.entered

    @property
    def innermost_collective(self) -> Collective | None:
        """Where a device computes, it may not be waiting for other ranks."""
        return find(self.stack.frames, self.helpers) if self.stack is not None else None

    @property
    def collective(self) -> str | None:
        """The one in which it can only be waiting for other ranks."""
        found = self.innermost_collective
        return found.name if found is not None and (found.certain or not self.accelerators) else None


def judge(ranks: Sequence[Rank]) -> Finding:
    left = [rank for rank in ranks if not rank.returned]
    if not left or not all(rank.idle for rank in left):
        return "going on"
    if all(rank.collective is not None for rank in left):
        return "stuck"
    return "alone" if len(left) < len(ranks) else "going on"


def sentence(name: str, ranks: Sequence[Rank]) -> str:
    returned = [rank.rank for rank in ranks if rank.returned]
    parts = [f"{_listed(returned)} returned"] if returned else []
    places: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.returned:
            places.setdefault(_where(rank), []).append(rank.rank)
    parts += [f"{_listed(numbers, 'stands', 'stand')} {where}" for where, numbers in places.items()]
    return f"{name}: {', '.join(parts)}. {cause(ranks)}".rstrip()


def cause(ranks: Sequence[Rank]) -> str:
    left = [rank for rank in ranks if not rank.returned]
    if len(ranks) == 1:
        return (
            "The call was sent to one node, and the others do not take part in its collectives. Send it to all with "
            "`call() @ pool`."
        )
    waiting = any(rank.collective is not None for rank in left)
    places = {rank.stack.frames for rank in left if rank.stack is not None}
    texts: list[str] = []
    if waiting and len(left) < len(ranks):
        texts.append("Ranks have made different numbers of steps, so that some wait for others that never come.")
    elif waiting and len(places) > 1:
        texts.append("They wait at different places: all ranks must enter the same collectives in the same order.")
    counted = [rank for rank in ranks if rank.collectives is not None]
    if waiting and len({rank.collectives for rank in counted}) > 1:
        texts.append(f"{_counted(counted)}.")
    shards = [rank for rank in ranks if rank.shard is not None]
    if len({rank.shard for rank in shards}) > 1:
        given = ", ".join(f"rank {rank.rank} {rank.shard[2]}" for rank in shards if rank.shard)
        whole = next(rank.shard[0] for rank in shards if rank.shard)
        texts.append(
            f"sky.shard gave {given} of {whole} elements; sky.shard(..., drop_last=True) or pad=True makes parts equal."
        )
    return " ".join(texts)


def stacks(ranks: Sequence[Rank]) -> Stacks:
    return Stacks(
        Stack(rank.rank, rank.node, "returned")
        if rank.returned
        else rank.stack or Stack(rank.rank, rank.node, "running", problem="its node did not answer")
        for rank in ranks
    )


def _where(rank: Rank) -> str:
    if rank.stack is None:
        return "where its node does not say"
    found = rank.innermost_collective
    place = rank.stack.place
    at = f"{place.short}:{place.line}" if place is not None else "an unknown place"
    where = f"in {found.name} ({at})" if found is not None else f"at {at} in {place.function}" if place else f"at {at}"
    return f"{where} without using CPU" if rank.idle else where


def _counted(ranks: Sequence[Rank]) -> str:
    first, *others = ranks
    text = f"Rank {first.rank} has entered {first.collectives} collectives"
    return ", ".join([text, *(f"rank {rank.rank} {rank.collectives}" for rank in others)])


def _listed(ranks: Sequence[int], one: str = "has", more: str = "have") -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown} {one}" if len(ranks) == 1 else f"ranks {shown} {more}"


# Watches broadcasts that seem to get nowhere: when nodes are asked, when the user is told, when one is stopped.
#
# No clock and no connection here: it gets events, and returns actions. It costs nothing as long
# as ranks use CPU, which nodes say anyway once a second, print, or yield: nodes are asked only when all of that has
# stopped.


_QUIET = 10.0  # seconds without any sign of life after which nodes are asked
_ALONE = 60.0  # and after which more is said than about ranks that wait in collectives
_SELDOM, _STUCK = 60.0, 20.0  # at most so many seconds between questions, also about ranks that are stuck
_ANSWER = 5.0
_BUSY = 5.0  # per cent of a core, or of a GPU
_NOISE = 0.05  # seconds of CPU that answering costs


class _Seen(NamedTuple):
    at: float
    stack: Stack
    collectives: int | None


@dataclass(eq=False)
class _Watch:
    calls: Sequence[Call]
    began: float
    returned: int = 0
    changed: float = 0.0
    survey: Survey | None = None
    looked: float = 0.0
    pause: float = 0.0
    before: dict[str, _Seen] = field(default_factory=dict[str, "_Seen"])
    stuck: int = 0
    told: bool = False


class StallWatch:
    """Each method is an event at time `now` and returns actions."""

    def __init__(self, pool: str, timeout: float | None, surveys: Surveys, accelerators: Callable[[int], bool]) -> None:
        self._pool, self._timeout, self._surveys, self._accelerators = pool, timeout, surveys, accelerators
        self._quiet = _QUIET if timeout is None else min(_QUIET, timeout)
        self._watches: list[_Watch] = []
        self._watched: set[str] = set()
        self._busy: dict[int, float] = {}

    def watch(self, calls: Sequence[Call], now: float) -> None:
        if calls[0].id not in self._watched:
            self._watches.append(_Watch(calls, now, changed=now))
            self._watched.add(calls[0].id)

    def sampled(self, number: int, cpu: float, gpu: float, now: float) -> None:
        """CPU in per cent of a core; of the GPUs the busiest, in per cent."""
        if cpu >= _BUSY or gpu >= _BUSY:
            self._busy[number] = now

    def turn(
        self, still: Mapping[str, Call], groups: bool, connected: Callable[[int], bool], now: float
    ) -> list[StallAction]:
        if groups:
            for call in still.values():
                if call.announced and not call.gang and call.stream is None:
                    self.watch([call], now)
        actions: list[StallAction] = []
        for watch in list(self._watches):
            left = [call for call in watch.calls if call.id in still]
            if not left:
                self._drop(watch)
            elif all(call.announced and call.state == "sent" and call.node is not None for call in left):
                actions += self._look(watch, left, connected, now)
        return actions

    def _drop(self, watch: _Watch) -> None:
        self._watches.remove(watch)
        self._watched.discard(watch.calls[0].id)
        if watch.survey is not None:
            self._surveys.close(watch.survey)

    def _look(self, watch: _Watch, left: list[Call], connected: Callable[[int], bool], now: float) -> list[StallAction]:
        returned = len(watch.calls) - len(left)
        spoke = max(call.spoke for call in left)
        if returned != watch.returned or spoke > watch.changed:
            watch.changed = now if returned != watch.returned else spoke
            watch.returned, watch.stuck = returned, 0
        survey = watch.survey
        if survey is not None:
            if not survey.complete and now - survey.asked < _ANSWER:
                return []
            watch.survey = None
            self._surveys.close(survey)
            return self._judge(watch, left, survey, now)
        still = self._still_since(watch, left)
        idle = now - still >= self._quiet
        lonely = returned > 0 and now - watch.changed >= _ALONE
        if not (idle or lonely) or now - watch.looked < watch.pause:
            return []
        nodes = {call.node for call in watch.calls if call.node is not None}
        ids = [call.id for call in left]
        watch.looked = now
        watch.survey, posts = self._surveys.ask([node for node in nodes if connected(node)], ids, now)
        return [*posts]

    def _still_since(self, watch: _Watch, left: list[Call]) -> float:
        return max(watch.changed, *(self._busy.get(call.node or 0, 0.0) for call in left))

    def _judge(self, watch: _Watch, left: list[Call], survey: Survey, now: float) -> list[StallAction]:
        idle_before = now - self._still_since(watch, left) >= self._quiet
        ranks, moved = self._ranks(watch, left, survey, idle_before, now)
        finding = judge(ranks)
        watch.stuck = watch.stuck + 1 if finding == "stuck" else 0
        watch.pause = min(_STUCK if watch.stuck else _SELDOM, max(self._quiet, 2 * watch.pause))
        quiet = now - self._still_since(watch, left)
        name = watch.calls[0].name
        if self._timeout is not None and watch.stuck > 1 and quiet >= self._timeout:
            why, where = sentence(name, ranks), stacks(ranks)
            return [Stall(call, Stalled(name, why, self._timeout, where)) for call in left]
        if self._timeout is not None and watch.stuck:
            watch.pause = min(watch.pause, max(0.5, self._timeout - quiet))
        lonely = len(left) < len(watch.calls) and now - watch.changed >= _ALONE
        speaks = finding == "stuck" or (lonely and not any(call.stream for call in left) and not moved)
        if watch.told or not speaks:
            return []
        watch.told = True
        text = sentence(name, ranks)
        if finding == "stuck" and self._timeout is not None:
            text += f" It is stopped after {self._timeout:g} s (stall_timeout)."
        waiting = tuple(rank.rank for rank in ranks if not rank.returned)
        return [Emit(events.BroadcastStalled(self._pool, name, waiting, text, stacks(ranks)))]

    def _ranks(
        self, watch: _Watch, left: list[Call], survey: Survey, idle: bool, now: float
    ) -> tuple[list[Rank], bool]:
        ranks: list[Rank] = []
        moved = False
        gang = watch.calls[0].header.get("gang", "")
        for number, call in enumerate(watch.calls):
            node = call.node if call.node is not None else -1
            rank = number if len(watch.calls) > 1 else node if call.rank is None else call.rank
            body, facts = _found(survey.bodies.get(node, []), call)
            part = facts.get("shards", {}).get(gang)
            collectives: int | None = facts.get("collectives")
            known = Rank(rank, node, call not in left, collectives=collectives, shard=tuple(part) if part else None)
            if body is not None and call in left:
                stack = stack_of(rank, node, body)
                before, watch.before[call.id] = watch.before.get(call.id), _Seen(now, stack, collectives)
                cpu, entered = 0.0 if idle else None, False
                if before is not None:
                    cpu = max(0.0, stack.cpu_seconds - before.stack.cpu_seconds - _NOISE) / max(now - before.at, 1e-3)
                    entered = collectives != before.collectives
                moved = moved or before is None or stack.frames != before.stack.frames
                gpus = self._accelerators(node)
                helpers = tuple(map(frames_of, facts.get("threads", ())))
                known = replace(known, stack=stack, helpers=helpers, cpu=cpu, entered=entered, accelerators=gpus)
            ranks.append(known)
        return ranks, moved


def _found(bodies: list[Body], call: Call) -> tuple[Body | None, Facts]:
    body = next((body for body in bodies if body.get("call") == call.id), None)
    place = call.header.get("place", 0)
    own = [body] if body is not None else [each for each in bodies if each["place"] == place]
    facts = [found for each in own if (found := each.get("facts"))]
    return body, facts[0] if facts else {}


@dataclass(frozen=True, slots=True)
class Collective:
    """`certain` is False where the same frames also wait for a device that computes."""

    name: str
    certain: bool


def find(frames: Sequence[Frame], helpers: Sequence[Sequence[Frame]] = ()) -> Collective | None:
    """The collective in which a body waits, by its innermost frame; stacks are outermost first.

    A body that waits for another thread waits in a collective if some of the `helpers` do, and the rest wait for work.
    A package that waits, as Keras does, waits for threads that run its own functions, if there are any.
    """
    if not _waits_for_thread(frames):
        return _collective(frames)
    active = [helper for helper in helpers if not _waits_for_thread(helper)]
    package = _package(frames[::-1])
    active = [helper for helper in active if package and _package(helper) == package] or active
    found = [_collective(helper, frames) for helper in active]
    known = [collective for collective in found if collective is not None]
    return min(known, key=lambda collective: not collective.certain) if len(known) == len(active) > 0 else None


def _collective(frames: Sequence[Frame], around: Sequence[Frame] = ()) -> Collective | None:
    while frames and _CALLS_C.search(frames[-1].file):
        frames = frames[:-1]
    for pattern, name, certain in _KINDS:
        if frames and pattern.search(frames[-1].file):
            return Collective(name((*around, *frames), pattern), certain)
    return None


def _waits_for_thread(frames: Sequence[Frame]) -> bool:
    return bool(frames) and _THREAD_WAIT.search(f"{frames[-1].file}:{frames[-1].function}") is not None


def _package(frames: Sequence[Frame]) -> str:
    outside = next((frame for frame in frames if not _PYTHON.search(frame.file)), None)
    found = _INSTALLED.search(outside.file) if outside is not None else None
    return found[1] if found is not None else ""


def _torch(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    """The user's call: the outermost public function."""
    for frame in _inner(frames, pattern):
        if not frame.function.startswith("_") and frame.function not in _WRAPPERS:
            return f"torch.distributed.{frame.function}"
    return "torch.distributed"


def _ddp(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    return "DistributedDataParallel"


def _backward(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    return "backward, where DistributedDataParallel adds up gradients"


def _jax(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    if any("/keras/" in frame.file for frame in frames):
        methods = [frame.function for frame in frames if frame.file.endswith("/trainer.py")]
        return f"Keras' {methods[0]}(), in JAX" if methods else "Keras, in JAX"
    shared = [frame for frame in frames if "/multihost_utils.py" in frame.file]
    return f"jax.experimental.multihost_utils.{shared[0].function}" if shared else "a computation of JAX"


def _tensorflow(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    return "a computation of TensorFlow"


def _inner(frames: Sequence[Frame], pattern: re.Pattern[str]) -> Sequence[Frame]:
    at = len(frames)
    while at and pattern.search(frames[at - 1].file):
        at -= 1
    return frames[at:]


_WRAPPERS = ("wrapper", "<module>", "unwrap", "trigger_wait")
_CALLS_C = re.compile(r"/torch/_ops\.py$")  # how functional collectives, as of FSDP2 and DTensor, enter C++
# Not `run` of a thread: a function written in C has no frame, so there it may do anything.
_THREAD_WAIT = re.compile(
    r"/lib/python3[^/]*/(threading\.py:(wait|wait_for|join|acquire|_wait_for_tstate_lock)"
    r"|queue\.py:(get|put|join)|concurrent/futures/(_base\.py:(result|exception|wait)|thread\.py:_worker))$"
)
_PYTHON = re.compile(r"/lib/python3[^/]*/(?!(site|dist)-packages/)")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_KINDS = (
    (re.compile(r"/torch/distributed/(?!checkpoint/)"), _torch, True),  # a checkpoint is written to slow disks
    (re.compile(r"/torch/nn/parallel/distributed\.py$"), _ddp, True),
    (re.compile(r"/jax/experimental/multihost_utils\.py$"), _jax, True),
    (re.compile(r"/torch/(autograd/|_tensor\.py$)"), _backward, False),
    (re.compile(r"/(jax|jaxlib|keras/src/backend/jax)/"), _jax, False),
    (re.compile(r"/tensorflow/python/(?!data/|ops/gen_dataset_ops\.py)"), _tensorflow, False),  # those read data
)


@dataclass
class Survey:
    request: int
    asked: float
    awaited: set[int]
    bodies: dict[int, list[Body]] = field(default_factory=dict[int, list[Body]])

    @property
    def complete(self) -> bool:
        return not self.awaited

    def stacks(self, ranks: Ranks) -> Stacks:
        found = [
            stack_of(ranks.rank(node, body["place"]), node, body)
            for node, bodies in self.bodies.items()
            for body in bodies
        ]
        return Stacks(sorted(found, key=lambda stack: (stack.rank, stack.call or "")))


class Surveys:
    def __init__(self) -> None:
        self._open: dict[int, Survey] = {}
        self._count = itertools.count(1)

    def ask(self, nodes: Iterable[int], ids: list[str] | None, now: float) -> tuple[Survey, list[Post]]:
        survey = Survey(next(self._count), now, set(nodes))
        self._open[survey.request] = survey
        message = ClientToAgent.Where(survey.request, ids)
        return survey, [Post(node, [message]) for node in sorted(survey.awaited)]

    def answered(self, number: int, request: int, bodies: list[Body]) -> None:
        survey = self._open.get(request)
        if survey is not None and number in survey.awaited:
            survey.awaited.discard(number)
            survey.bodies[number] = bodies

    def close(self, survey: Survey) -> None:
        self._open.pop(survey.request, None)


def stack_of(rank: int, node: int, body: Body) -> Stack:
    return Stack(
        rank,
        node,
        body["state"],
        body.get("call"),
        body.get("name", ""),
        body.get("seconds", 0.0),
        body["cpu"],
        frames_of(body.get("frames")),
        body.get("problem", ""),
    )


def frames_of(given: CodeFrames | None) -> tuple[Frame, ...]:
    return tuple(Frame(str(file), int(line), str(function)) for file, line, function in given or ())
