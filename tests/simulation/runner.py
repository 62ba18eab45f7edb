"""Runner processes: the real states of calls, with threads and bodies that the world moves step by step."""

from __future__ import annotations

import json
import pickle
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from skyward.api.info import VARIABLE, InstanceInfo
from skyward.node.body import Ending, RunnerCall
from skyward.node.protocol import AgentToRunner, Exited, Raised, Returned, Run, RunnerToAgent, Stopped
from skyward.node.runner import RunnerCalls
from skyward.node.runners import Ended, Said
from skyward.transport import blobs, codec
from skyward.transport.codec import Message
from skyward.transport.exceptions import Described
from skyward.transport.streams import WINDOW

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SimProcess", "SimRunners"]


class _Worker:
    """One thread of a runner."""

    def __init__(self) -> None:
        self.call: RunnerCall | None = None
        self.phase = "idle"  # idle, claimed, body, ended
        self.until = 0.0
        self.interrupted = False
        self.left = 0
        self.wanted: dict[str, int] = {}
        self.ending: Ending = partial(Returned)


class SimProcess:
    """A runner process."""

    def __init__(self, world: World, node: int, name: str, threads: int, place: int) -> None:
        self.world, self.node, self.name, self.threads, self.place = world, node, name, threads, place
        self.pid = 1
        self.generation = name.partition("-")[0]
        self.calls: RunnerCalls[RunnerCall] = RunnerCalls()
        self.queue: deque[RunnerCall | None] = deque()
        self.inbox: deque[tuple[list[Any], list[Any]]] = deque()
        self.outbox: deque[tuple[list[Any], list[Any]]] = deque()
        self.workers = [_Worker() for _ in range(threads)]
        self.page: list[tuple[str, float, float]] = [("", 0.0, 0.0)] * threads
        self.status = self
        self.exit: int | None = None
        self.started = False
        self.frozen_until = self.deaf_until = 0.0
        self.credit: dict[str, int] = {}
        self.closed: set[str] = set()
        self.arrived: dict[tuple[str, str], list[Any]] = {}
        self.killed_at: float | None = None
        self.stack = ""
        self.objects: set[str] = set()  # kept results that were made here, or used

    # what the agent asks of a process

    def read(self) -> list[tuple[str, float, float]]:
        return [entry for entry in self.page if entry[0]]

    def stderr_tail(self, mark: bytes) -> str:
        return ""

    def new_call(self, mark: bytes) -> None:
        pass

    # steps

    def die(self, status: int, *, ordered: bool = False) -> None:
        """The process ends: by itself, by a misfortune, or since the agent has `ordered` it."""
        if self.exit is None:
            self.exit = status
            marked = self.world.innocent if ordered else self.world.victims
            marked.update((w.call.id, w.call.header["attempt"]) for w in self.workers if w.call is not None)
            unsaid = [w.ending.keywords for w in self.workers if w.phase == "ended"]
            self.world.orphans.update(fields["blobs"]["0"][0] for fields in unsaid if "kept" in fields)
            for broken in self.world.broken_groups:
                broken.add(self.generation)  # on all nodes: none of them is complete any more
            self.inbox.clear()
            for worker in self.workers:
                if worker.phase == "body" and worker.call is not None:
                    self.world.body_ended(worker.call)

    def step_reader(self) -> bool:
        """The reader thread handles one message."""
        now = self.world.now
        if self.exit is not None or now < max(self.frozen_until, self.deaf_until) or not self.inbox:
            return False
        raw, buffers = self.inbox.popleft()
        kind, body = raw[0], raw[1:-1]
        message = codec.decoder(AgentToRunner.messages()[kind])(raw, buffers)
        if kind == "init":
            self.started = True
            if self.world.hooks_fail > 0:
                self.world.hooks_fail -= 1
                self.die(70)
            else:
                self.say(RunnerToAgent.Ready())
        elif kind == "call":
            assert isinstance(message, Run)
            call = RunnerCall(message.id, message.header, list(message.buffers))
            self.arrived.pop((call.id, "0"), None)  # of an earlier time that it was sent here
            if self.calls.add(call):
                self.queue.append(call)
            else:
                self.say(RunnerToAgent.Recalled(call.id))
        elif kind == "recall":
            if self.calls.recall(body[0]):
                self.say(RunnerToAgent.Recalled(body[0]))
        elif kind == "cancel":
            self._cancel(body[0])
        elif kind == "exit":
            self.queue.extend([None] * self.threads)
        elif kind == "facts":
            self.say(RunnerToAgent.Facts({"collectives": 1, "shards": {}}))
        elif kind == "forget":
            self.objects.difference_update(body[0])
        elif kind == "grant":
            self.credit[body[0]] = min(WINDOW, self.credit.get(body[0], 0) + body[1])
        elif kind == "close":
            self.closed.add(body[0])
            self.world.closes[body[0]] = now
        elif kind == "items":
            self.arrived.setdefault((body[0], body[1]), []).extend(body[2])
        elif kind == "end":
            self.arrived.setdefault((body[0], body[1]), []).append(None)
        return True

    def _cancel(self, call_id: str) -> None:
        call, given = self.calls.cancel(call_id)
        if call is None:
            if given:
                self.say(RunnerToAgent.Recalled(call_id))
            return
        self.say(RunnerToAgent.Leaving(given))
        for worker in self.workers:
            if worker.call is call:
                worker.interrupted = True
        self.queue.extend([None] * self.threads)

    def step_worker(self, index: int) -> bool:
        """One thread goes on."""
        world, worker = self.world, self.workers[index]
        if self.exit is not None or world.now < self.frozen_until:
            return False
        if worker.phase == "idle":
            return self._claim(index, worker)
        call = worker.call
        assert call is not None
        if worker.phase == "claimed":
            world.body_started(call, self)
            self.page[index] = (call.id, self.page[index][1], world.now)
            self.objects.update(call.header.get("refs", ()))
            plan = world.plans[call.id]
            worker.phase, worker.until, worker.left = "body", world.now + plan.seconds, plan.items
            self.credit.setdefault(call.id, WINDOW)
            if plan.outcome == "stream":
                self.say(RunnerToAgent.Streaming(call.id))
            return True
        if worker.phase == "body":
            return self._body(call, worker)
        self.calls.end(call)  # ended: the verdict goes home
        self.say(worker.ending(id=call.id, seconds=max(0.0, world.now - self.page[index][1]), group=world.groups))
        worker.phase, worker.call, worker.interrupted = "idle", None, False
        if self.calls.leaving and all(w.phase == "idle" for w in self.workers):
            self.die(0)
        return True

    def _claim(self, index: int, worker: _Worker) -> bool:
        if not self.queue or not self.started:
            return False
        call = self.queue.popleft()
        if call is None:
            if all(w.phase == "idle" for w in self.workers):
                self.die(0)
            return True
        if self.calls.claim(call):
            self.world.claimed(call, self)
            self.page[index] = (call.id, self.world.now, 0.0)
            worker.call, worker.phase, worker.wanted = call, "claimed", {}
            worker.interrupted = call.state == "stopping"
        return True

    def _body(self, call: RunnerCall, worker: _Worker) -> bool:
        world = self.world
        plan = world.plans[call.id]
        if (worker.interrupted or call.state == "stopping") and plan.heeds:
            return self._end(call, worker, partial(Stopped))
        if self.misses_a_rank(call.id):
            return False
        if plan.outcome == "stream" and worker.left and call.id not in self.closed:
            if self.credit[call.id] <= 0:
                return False
            count = min(worker.left, self.credit[call.id], world.more.choice((1, 5, 100)))
            first = plan.items - worker.left + 1
            self.credit[call.id] -= count
            worker.left -= count
            data = [pickle.dumps((call.id, item)) for item in range(first, first + count)]
            self.say(RunnerToAgent.Items(call.id, [1] * count, data))
            return True
        if plan.reads and (call.id, "0") in self.arrived and None not in self.arrived[call.id, "0"]:
            count = len(self.arrived[call.id, "0"])
            if count > worker.wanted.get("0", 0):
                self.say(RunnerToAgent.Want(call.id, "0", count - worker.wanted.get("0", 0)))
                worker.wanted["0"] = count
                return True
        if plan.reads and None not in self.arrived.get((call.id, "0"), []):
            return False  # waits for its input
        if world.now < worker.until or plan.outcome == "wait":
            return False
        match plan.outcome:
            case "crash":
                self.die(-11)
                return True
            case "error":
                return self._end(call, worker, partial(Raised, error=_ERROR, buffers=[b""]))
            case "exit":
                return self._end(call, worker, partial(Exited, code=3))
            case _:
                if plan.reads:
                    world.check(
                        self.arrived[call.id, "0"] == [*([1] * plan.reads), None], f"input of {call.id} differs"
                    )
                return self._end(call, worker, self._result(call))

    def misses_a_rank(self, call: str) -> bool:
        """Whether a body waits in a group for a rank that is gone, and had not finished."""
        awaited = self.world.partners.get(call, set()) - self.world.completed
        return self.world.groups and bool(awaited) and self.generation in self.world.broken_groups[self.node]

    def _result(self, call: RunnerCall) -> Ending:
        if "keep" not in call.header:
            return partial(Returned, buffers=[pickle.dumps(call.id)])
        key = call.header["keep"]
        self.objects.add(key)
        names = blobs.kept_names(key, call.header["attempt"], 1)
        if not self.world.lease:
            names = [path for path, _ in blobs.keep(self.world.directory, names, [b"x"], {})]
        return partial(Returned, kept=key, blobs={"0": (names[0], 1)}, buffers=[b""])

    def _end(self, call: RunnerCall, worker: _Worker, ending: Ending) -> bool:
        worker.ending, worker.phase = ending, "ended"
        if ending.func is Returned:
            self.world.completed.add(call.id)
        self.world.body_ended(call)
        return True

    def say(self, message: Message) -> None:
        raw, buffers = message.encoded()
        self.outbox.append((json.loads(json.dumps(raw)), [memoryview(b) for b in buffers]))


_ERROR: Described = {"type": "builtins.ValueError", "message": "no", "traceback": "ValueError: no\n"}


class SimRunners:
    """What an agent has of its runner processes."""

    full = False

    def __init__(self, selector: Any, world_and_node: Any) -> None:
        self.world, self.node = world_and_node
        self.processes: dict[str, SimProcess] = {}
        self.unsent: list[tuple[SimProcess, Any, list[Any]]] = []

    @property
    def gone(self) -> bool:
        return not self.processes

    def pids(self) -> list[int]:
        return []

    def spawn(self, name: str, threads: int, env: Any, cwd: str) -> None:
        place = InstanceInfo.from_json(env[VARIABLE]).local_rank if env[VARIABLE] else 0
        self.processes[name] = SimProcess(self.world, self.node, name, threads, place)
        self.world.changed_actors()

    def send(self, name: str, message: Message) -> None:
        process = self.processes.get(name)
        if process is not None and process.exit is None:
            raw, buffers = message.encoded()
            self.world.t("agent %d -> %s %s", self.node, name, raw[:2])
            self.unsent.append((process, json.loads(json.dumps(raw)), list(buffers)))

    def flush(self) -> None:
        for process, raw, buffers in self.unsent:
            process.inbox.append((raw, buffers))
        self.unsent.clear()

    def send_all(self, message: Message) -> None:
        for name in self.processes:
            self.send(name, message)

    def status(self, name: str) -> list[tuple[str, float, float]]:
        process = self.processes.get(name)
        return process.read() if process is not None else []

    def ask_stack(self, name: str, call: str | None) -> str:
        process = self.processes.get(name)
        if process is None or process.exit is not None:
            return "its process is gone"
        waits = call is not None and (self.world.plans[call].outcome == "wait" or process.misses_a_rank(call))
        inner = "/torch/distributed/distributed_c10d.py" if waits else "/home/me/train.py"
        process.stack = f'  File "{inner}", line 1 in f\n  File "/node/runner.py", line 1 in _work\n'
        return ""

    def stack(self, name: str) -> str:
        process = self.processes.get(name)
        alive = process is not None and process.exit is None and self.world.now >= process.frozen_until
        return process.stack if process is not None and alive else ""

    def pid(self, name: str) -> int | None:
        return 1

    def kill(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.killed_at is None:
            process.killed_at = self.world.now

    def kill_all(self) -> None:
        for name in self.processes:
            self.kill(name)

    def unanswered(self) -> int:
        """While there are faults, the fork server may be slow to kill."""
        pending = any(process.killed_at is not None for process in self.processes.values())
        return int(self.world.faults and pending)

    def drain(self, process: SimProcess) -> list[Any]:
        return []

    def forget(self, process: SimProcess) -> None:
        del self.processes[process.name]
        self.world.changed_actors()

    def resume(self) -> None:
        pass

    def pending(self) -> list[SimProcess]:
        return [p for p in self.processes.values() if p.outbox or p.exit is not None]

    def read(self, process: SimProcess) -> list[Any]:
        """What a runner has said, and that it has ended."""
        count = len(process.outbox) if process.exit is not None else self.world.rng.randint(1, len(process.outbox))
        happened: list[Any] = []
        runner: Any = process
        for _ in range(count):
            message, buffers = process.outbox.popleft()
            self.world.t("agent %d <- %s %s", self.node, process.name, message[:2])
            happened.append(Said([message], buffers, runner))
        if process.exit is not None:
            self.world.t("agent %d: %s exited %s", self.node, process.name, process.exit)
            happened.append(Ended(runner, process.exit))
        return happened
