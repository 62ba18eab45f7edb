"""What happens to a simulated pool: what its user does, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyward.api.compute import PendingCompute
from skyward.client.call import Call, CallFuture
from skyward.client.kept import KeptResult
from skyward.errors import NodeLost
from skyward.transport.streams import WINDOW

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Body", "broadcast", "cancel", "let_go", "lose_one", "misfortune", "submit"]


@dataclass
class Body:
    """What a call's body does."""

    seconds: float
    outcome: str = "ok"
    heeds: bool = True
    items: int = 0
    reads: int = 0
    timeout: float | None = None
    retries: int = 0


def submit(world: World, count: int) -> None:
    calls = [_call(world, _any_body(world)) for _ in range(count)]
    for call in calls:
        if not world.keeping:
            continue
        _take_something(world, call)
        if world.extra.random() < 0.4 and not world.bodies[call.id].items:
            _keep(world, call)
            call.ref = "a Ref"  # type: ignore[assignment]
            world.keeps(call)
    try:
        world.engine.send(calls)
    except NodeLost:
        for call in calls:
            for sent in (*call.inner, call):
                world.release(sent.uploads)
        return
    world.refs += [call.keeps for call in calls if call.keeps is not None]
    _adopt(world, calls)


def _take_something(world: World, call: Call, depth: int = 0) -> None:
    """Arguments that are kept results, or other calls."""
    rng = world.extra
    if world.refs and rng.random() < 0.5:
        call.needs = rng.sample(world.refs, min(len(world.refs), rng.randint(1, 2)))
    while rng.random() < 0.1 and depth < 3:
        inner = _call(world, _any_body(world, rng))
        world.bodies[inner.id].items = 0
        if world.bodies[inner.id].outcome == "stream":
            world.bodies[inner.id].outcome = "ok"
        _take_something(world, inner, depth + 1)
        _keep(world, inner)
        assert inner.keeps is not None
        call.needs = [*call.needs, inner.keeps]
        call.inner = [*call.inner, *inner.inner, inner]
        inner.inner = []


def _keep(world: World, call: Call) -> None:
    call.keeps = KeptResult(world.token() + "cafe", "f")
    call.header["keep"] = call.keeps.key


def let_go(world: World) -> None:
    """The user lets go of a Ref, or asks for what it stands for."""
    if not world.refs:
        return
    result = world.extra.choice(world.refs)
    if world.extra.random() < 0.4:
        world.refs.remove(result)
        world.engine.release_kept(result)
    else:
        future: CallFuture[Any] = CallFuture("f")
        try:
            world.engine.get_kept(result, future)
        except NodeLost:
            return
        world.open.append(future)


def lose_one(world: World) -> None:
    """A node that keeps results dies, or vanishes."""
    keepers = sorted({number for result in world.refs for number in result.where})
    if not keepers or not world.tough:
        return
    machine = world.machines[world.extra.choice(keepers)]
    if not machine.alive:
        return
    world.t("misfortune: node %d, which keeps results", machine.node)
    if world.replaces and world.extra.random() < 0.3:
        machine.vanish()
    else:
        machine.kill_agent()


def broadcast(world: World) -> None:
    there = world.nodes - len(world.joining)
    if len(world.engine.up()) < there and world.more.random() < 0.9:
        return  # else it waits for the others
    outcome = world.rng.choice(("ok", "ok", "ok", "error", "crash", "wait" if there > 1 else "ok"))
    body = Body(world.rng.choice((0.001, 0.05, 1.0)), outcome)
    body.heeds = world.rng.random() < 0.9
    ranks = there * world.places
    calls = [_call(world, body if i == 0 else Body(body.seconds, heeds=body.heeds)) for i in range(ranks)]
    world.rng.shuffle(calls)
    try:
        sent = world.engine.send_to(list(enumerate(calls)), ranks)
    except NodeLost:
        sent = False
    if not sent:
        world.release(name for call in calls for name in call.uploads)
        return
    world.gangs.append(calls)
    world.partners |= {call.id: {other.id for other in calls if other is not call} for call in calls}
    _adopt(world, calls)


def cancel(world: World) -> None:
    world.open = [future for future in world.open if not future.done()]
    if world.open:
        future = world.rng.choice(world.open)
        world.cancelled.add(future)
        future.cancel()


def _adopt(world: World, calls: list[Call]) -> None:
    world.calls += calls
    for call in calls:
        world.futures[call.id] = call.future
        world.open.append(call.future)
        if world.bodies[call.id].items:
            world.awaited.append(call.id)


def _any_body(world: World, rng: random.Random | None = None) -> Body:
    rng = rng or world.rng
    body = Body(rng.choice((0.0002, 0.001, 0.005, 0.03, 0.3)) if rng.random() < 0.9 else rng.choice((4.0, 40.0)))
    body.outcome = rng.choices(("ok", "error", "crash", "exit", "stream"), (20, 2, 1, 1, 2))[0]
    body.heeds = rng.random() < 0.9
    body.items = rng.randint(1, 6) if body.outcome == "stream" else 0
    if body.outcome == "stream" and world.more.random() < 0.4:
        body.items, body.seconds = world.more.randint(1, 3 * WINDOW), world.more.choice((0.001, 40.0))
    body.retries = rng.choice((0, 1, 3))
    if rng.random() < 0.08:
        body.reads, body.retries = rng.randint(1, 6), 0
    if rng.random() < 0.15:
        body.timeout = rng.choice((0.002, 0.05, 0.5))
    return body


def _call(world: World, body: Body) -> Call:
    about: dict[str, Any] = {"name": "f", "fn": "", "split": 0, "attempt": 0}
    uploads: dict[str, Any] = {}
    if body.timeout is not None:
        about["timeout"] = body.timeout
    if body.reads:
        about["streams"] = ["0"]
    if world.lease and world.rng.random() < 0.3:
        name = f"{world.rng.randint(1, 3):032x}"
        uploads, about["blobs"] = {name: ("/nowhere", 1)}, {"0": (name, 1)}
        world.kept[name] += 1
    pending = PendingCompute[Any](abs, label="f")
    inputs = {"0": range(body.reads)} if body.reads else {}
    call: Call = _Call(pending, about, [], uploads, inputs, body.retries)
    call.world = world  # type: ignore[attr-defined]
    call.made = world.now
    world.bodies[call.id] = body
    return call


class _Call(Call):
    """A call whose body the world knows, also when it is started again for the sake of its result."""

    world: World

    def again(self) -> Call:
        made = super().again()
        assert made.keeps is not None
        self.world.remade[made.keeps.key] += 1
        often = self.world.remade[made.keeps.key]
        self.world.check(often <= self.world.bodies[self.id].retries, f"{made.keeps.key} is made again too often")
        made.world, self.world.bodies[made.id] = self.world, self.world.bodies[self.id]  # type: ignore[attr-defined]
        return made


def misfortune(world: World) -> None:
    rng = world.rng
    machine = rng.choice(world.machines)
    if machine.node in world.joining:
        return
    processes = list(machine.runners.processes.values())
    what = rng.choice(
        ("kill", "freeze", "deaf", "agent freeze", "cut", "cut", "mute", "agent", "hooks", "notice", "vanish")
    )
    if what in ("kill", "freeze", "deaf") and processes:
        process = rng.choice(processes)
        world.t("misfortune: %s %s of node %d", what, process.name, machine.node)
        if what == "kill":
            process.die(-9)
        else:
            setattr(
                process,
                "frozen_until" if what == "freeze" else "deaf_until",
                world.now + rng.choice((0.05, 1.0, 6.0)),
            )
            world.disturbed = max(world.disturbed, world.now + 6.0)
        return
    if not world.tough or not machine.alive:
        return
    world.t("misfortune: %s of node %d", what, machine.node)
    connection = machine.connection
    if what == "agent freeze":
        machine.frozen_until = world.now + rng.choice((0.07, 0.5, 12.0))
        world.disturbed = max(world.disturbed, machine.frozen_until)
    elif what in ("cut", "mute") and connection is not None:
        world.cut_off[machine.node] = world.now + rng.choice((0.0, 0.5, 5.0, 20.0))
        if what == "cut":
            connection.cut()
        else:
            connection.mute = True
    elif what == "agent":
        machine.kill_agent()
    elif what == "hooks" and not world.groups:
        world.hooks_fail = 1
    elif what == "notice" and world.lease and machine.node not in world.going:
        seconds = rng.choice((3.0, 30.0))
        world.going[machine.node] = world.now + seconds
        machine.agent.notice(seconds)
        machine.agent.poll()
        machine.agent.turn()
    elif what == "vanish" and world.lease and rng.random() < 0.3:
        machine.vanish()
