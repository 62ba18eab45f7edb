"""One node: takes calls from the client, hands them to runners, sends home what they make. Never runs user code.

    client <==TLS link==> Agent thread <==sockets, pipes==> runners (forked by the nursery)
                          main thread: dask worker (membership; users' own dask work)

The agent forwards payloads as bytes. It keeps results and output until the client has acknowledged them, so a client
that loses its connection misses nothing.
"""

from __future__ import annotations

import itertools
import os
import queue
import selectors
import signal
import socket
import ssl
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from skyward.engine.crew import Crew
from skyward.engine.door import Door
from skyward.engine.freight import Freight
from skyward.engine.homeward import Homeward
from skyward.engine.slots import Pipe, RunnerSlot, Task, ahead
from skyward.engine.timers import Timers
from skyward.engine.vitals import Vitals

__all__ = ["Agent"]

_ANNOUNCE = 0.05
_SAMPLE = 1.0
_OUTPUT_LIMIT = 8 << 20
_OUTPUT_LIMIT_ALONE = 64 << 20
_SPAWN_ATTEMPTS = 3


class Agent:
    """Serves the pool's client on `listener` until it says bye."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        nursery: socket.socket,
        join: Callable[[str], None],
        heard: Callable[[float], None],
        freight: Freight,
        about: dict[str, Any],
    ) -> None:
        self._join, self._heard, self._freight = join, heard, freight
        self._selector = selectors.DefaultSelector()
        self._home = Homeward(self._selector, about, self._obey, self._fence)
        self._tell = self._home.tell
        self._door = Door(listener, context, self._wake, freight.serve)
        freight.wake = self._wake
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._crew = Crew(self._selector, nursery, self._heed, self._output, self._ended, self._output_full)
        self._settings: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._names = itertools.count()
        self._failed_spawns = 0
        self._queue: OrderedDict[str, Task] = OrderedDict()
        self._tasks: dict[str, Task] = {}
        self._recent: deque[Task] = deque()
        self._timers = Timers()
        self._mean: float | None = None
        self._dropped = 0
        self._vitals = Vitals()
        token = os.urandom(8).hex()
        self._mark = b"\0" + token.encode()
        self._token = token
        self._closing = self._done = False
        self._notices: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._leaving: float | None = None  # when this machine will be taken away

    def run(self) -> None:
        """Runs until the client says bye, then returns."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._door.open()
        self._timers.after(_SAMPLE, self._sample)
        while not self._done:
            more = self._home.pending()
            for key, events in self._selector.select(0 if more else self._wait()):
                key.data(events)
            if more:
                self._home.hear(0)
            self._crew.resume()
            self._timers.run()
            self._announce()
            self._freight.send(lambda: self._home.kept_bytes, self._home.tell_now)
            self._home.flush()

    def say(self, kind: str, body: Any) -> None:
        """Sends a message to the client, from any thread of this process."""
        self._home.say(kind, body)
        self._wake()

    def notice(self, seconds: float) -> None:
        """Says, from any thread, that this machine will be taken away in so many seconds."""
        self._notices.put(seconds)
        self._wake()

    # the client's connection

    def _on_wake(self, _: int) -> None:
        try:
            self._wake_read.recv(4096)
        except BlockingIOError:
            pass
        while (admitted := self._door.next()) is not None:
            self._home.attach(*admitted)
        while not self._freight.arrivals.empty():
            name, good = self._freight.arrivals.get()
            self._on_blob(name) if good else self._tell("need", name)
        while not self._notices.empty():
            self._on_notice(self._notices.get())

    def _fence(self) -> None:
        """The client had given this node up, and what it ran may run elsewhere by now: none of it may go on."""
        self._freight.abandon()
        for task in list(self._tasks.values()):
            self._forget(task)
        self._queue.clear()
        for slot in self._crew:
            self._crew.retire(slot)
        if self._leaving is not None:
            self._tell("notice", {"seconds": max(0.0, self._leaving - time.monotonic())})

    # what the client says

    def _obey(self, kind: str, body: list[Any], buffers: list[Any]) -> None:
        if kind == "call":
            self._take(Task(body[0], body[1], buffers))
        elif kind == "blob":
            name, offset, total = body
            self._on_piece(name, offset, total, buffers[0])
        elif kind == "expect":
            self._freight.expect(body[0])
        elif kind == "fetch":
            self._freight.fetch(*body)
        elif kind == "setup":
            self._setup(body[0], buffers)
        elif kind == "info":
            self._inform(body[0])
        elif kind == "recall":
            self._recall(body[0])
        elif kind == "cancel":
            self._cancel(*body)
        elif kind == "ports":
            self._tell("ports", self._door.free_ports(body[0]))
        elif kind == "bye":
            self._close(body[0])
        else:  # about a stream: for the runner that has the call
            task = self._tasks.get(body[0])
            if task is not None and task.slot is not None:
                self._crew.send(task.slot, [kind, *body], buffers)
            elif task is not None:
                task.backlog.append(([kind, *body], buffers))

    def _setup(self, settings: dict[str, Any], buffers: list[Any]) -> None:
        """(Re)makes every runner, with the pool's current view of itself and the plugins' hooks."""
        self._settings, self._hooks, self._failed_spawns = settings, buffers, 0
        self._freight.shared = settings["shared"]
        if settings["scheduler"] is not None:
            self._join(settings["scheduler"])
        for task in list(self._tasks.values()):
            if task.slot is not None:
                self._finish(task, task.stop or "lost", {"reason": "the pool's processes were replaced"})
        for slot in self._crew:
            self._crew.retire(slot)
        self._spawn_missing()

    def _inform(self, settings: dict[str, Any]) -> None:
        """Another machine stands in for one of the pool: runners learn of it without being made anew."""
        if self._settings:
            self._settings |= settings
            for slot in self._crew:
                self._crew.send(slot, ["info", settings["info"]])
        if settings["scheduler"] is not None:
            self._join(settings["scheduler"])

    def _on_notice(self, seconds: float) -> None:
        """This machine will be taken away: bodies are told, and calls that have not begun go back."""
        self._leaving = time.monotonic() + seconds
        self._tell("notice", {"seconds": seconds})
        for slot in self._crew:
            self._crew.send(slot, ["notice", seconds])
        for task in [task for task in self._tasks.values() if task.started is None and not task.about.get("gang")]:
            self._recall(task.id)

    def _recall(self, call_id: str) -> None:
        task = self._queue.pop(call_id, None)
        if task is not None:
            del self._tasks[call_id]
            self._tell("recalled", call_id)
            return
        task = self._tasks.get(call_id)
        if task is not None and task.slot is not None:
            self._crew.send(task.slot, ["recall", call_id])

    def _cancel(self, call_id: str, why: str, grace: float) -> None:
        task = self._tasks.get(call_id)
        if task is None:
            return  # it has ended meanwhile; its result is on the way
        if task.slot is None:
            del self._queue[call_id]
            self._finish(task, why, {})
        elif task.started is None:
            task.stop = why  # it waits in the runner, which gives it back unless it has just begun
            self._crew.send(task.slot, ["recall", call_id])
        else:
            self._stop(task, why, grace)

    def _close(self, grace: float) -> None:
        self._closing = True
        self._queue.clear()
        for slot in self._crew:
            if slot.inflight or not slot.ready:
                self._crew.kill(slot)
            else:
                self._crew.send(slot, ["exit"])
        self._timers.after(grace, self._crew.kill_all)
        self._timers.after(grace + 1.0, self._leave)
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._closing and self._crew.gone:
            self._leave()

    def _leave(self) -> None:
        self._home.tell_now("bye")
        self._done = True

    # calls and runners

    def _take(self, task: Task) -> None:
        """Queues a call; one whose large buffers are still on their way waits for them."""
        if self._leaving is not None and not task.about.get("gang"):
            self._tell("recalled", task.id)  # it was on its way when the notice came
            return
        self._tasks[task.id] = self._queue[task.id] = task
        wanted = task.about.get("blobs")
        if wanted and not self._freight.shared:
            task.digests = [name for name, _ in wanted.values()]
            task.about["blobs"], task.missing = self._freight.take(wanted)
            for name in task.missing:
                if not self._freight.coming(name):
                    self._tell("need", name)
        self._pump()

    def _on_piece(self, name: str, offset: int, total: int, data: Any) -> None:
        try:
            if self._freight.accept(name, offset, total, data):
                self._on_blob(name)
        except OSError as exc:  # the disk is full: the calls that need the buffer cannot run here
            for task in [task for task in self._queue.values() if name in task.missing]:
                del self._queue[task.id]
                self._finish(task, "noroom", {"size": total, "reason": str(exc.strerror)})

    def _on_blob(self, name: str) -> None:
        for task in self._queue.values():
            task.missing.discard(name)
        self._pump()

    def _next_task(self) -> Task | None:
        """The first call that has all it needs; calls of broadcasts do not overtake each other."""
        if self._queue and not next(iter(self._queue.values())).missing:
            return self._queue.popitem(last=False)[1]
        held = False
        for task in self._queue.values():
            if not task.missing and not (held and task.about.get("gang")):
                return self._queue.pop(task.id)
            held = held or bool(task.about.get("gang"))
        return None

    def _pump(self) -> None:
        """Gives waiting calls to runners that have room."""
        while self._queue:
            slot = self._roomy()
            task = self._next_task() if slot is not None else None
            if slot is None or task is None:
                return
            task.slot = slot
            if len(slot.inflight) >= slot.threads == 1:
                task.about["ahead"] = True  # the runner marks in its output where this call begins
            slot.inflight[task.id] = task
            self._crew.send(slot, ["call", task.id, task.about], task.buffers)
            for message, buffers in task.backlog:
                self._crew.send(slot, message, buffers)
            task.backlog.clear()
            self._mark_started(slot)

    def _shift(self) -> None:
        """Takes calls that wait behind others back from their runners, when runners have nothing to do."""
        idle = sum(slot.ready and not slot.stopping and not slot.inflight for slot in self._crew)
        if not idle or self._queue:
            return
        waiting = [t for s in self._crew for t in s.inflight.values() if t.started is None and t.stop is None]
        for task in [t for t in waiting if not t.shifting][:idle]:
            assert task.slot is not None
            task.shifting = True
            self._crew.send(task.slot, ["recall", task.id])

    def _roomy(self) -> RunnerSlot | None:
        ready = [slot for slot in self._crew if slot.ready and not slot.stopping]
        best = min(ready, key=lambda slot: len(slot.inflight), default=None)
        if best is None:
            return None
        # nothing is sent ahead while another runner is about to be there
        spare = ahead(self._mean, best.threads) if len(ready) == self._settings["processes"] else 0
        if len(best.inflight) >= best.threads + spare:
            return None
        return best

    def _mark_started(self, slot: RunnerSlot) -> None:
        """Runners take calls in order: the first `threads` of them are running."""
        now = time.monotonic()
        for task in itertools.islice(slot.inflight.values(), slot.threads):
            if task.started is None:
                task.started = now
                self._vitals.refresh()
                self._recent.append(task)
                slot.stderr_mark()
                limit = task.about.get("timeout")
                if task.stop is not None:
                    why, task.stop = task.stop, None
                    self._stop(task, why, self._settings["grace"])
                elif limit is not None:
                    task.timer = self._timers.after(limit, lambda task=task: self._time_out(task))

    def _time_out(self, task: Task) -> None:
        if self._tasks.get(task.id) is task and task.stop is None:
            self._stop(task, "timeout", self._settings["grace"])

    def _stop(self, task: Task, why: str, grace: float) -> None:
        """Ends a call that may be running: asks, waits `grace`, kills."""
        slot = task.slot
        if slot is None or task.stop is not None:
            return
        task.stop = why
        if slot.threads == 1 and task.started is not None:
            slot.stopping = True
        self._crew.send(slot, ["stop", task.id])
        self._timers.after(grace, lambda: self._kill_for(task, slot))

    def _kill_for(self, task: Task, slot: RunnerSlot) -> None:
        if self._tasks.get(task.id) is task and task.slot is slot:
            task.killed = True
            for other in slot.inflight.values():
                if other.stop is None and other.started is not None:
                    other.stop = "lost"  # it only shared the process
            self._crew.kill(slot)

    def _forget(self, task: Task) -> bool:
        """Takes a call out of this node's books; False if it had left them already."""
        if self._tasks.pop(task.id, None) is None:
            return False
        if task.slot is not None:
            task.slot.inflight.pop(task.id, None)
        if task.timer is not None:
            self._timers.cancel(task.timer)
        if task.digests:
            self._freight.drop(task.digests)
        return True

    def _finish(self, task: Task, kind: str, about: dict[str, Any], buffers: list[Any] | None = None) -> None:
        """The one place where a call ends on this node."""
        if not self._forget(task):
            return
        if task.started is not None:
            seconds = about.setdefault("s", time.monotonic() - task.started)
            self._mean = seconds if self._mean is None else 0.8 * self._mean + 0.2 * seconds
        if kind == "timeout":
            about |= {"limit": task.about["timeout"], "killed": task.killed}
        if kind == "crashed" or (task.slot is not None and task.slot.stopping):
            about["replaced"] = True  # the client must know before it sends more: a group may be broken
        self._freight.ship(task.id, about, lambda: self._tell(kind, task.id, about, buffers=buffers))
        task.buffers = []

    def _spawn_missing(self) -> None:
        settings = self._settings
        while len(self._crew) < settings["processes"] and self._failed_spawns < _SPAWN_ATTEMPTS and not self._closing:
            name = f"{settings['generation']}-{next(self._names)}"
            env = {**settings["env"], "COMPUTE_POOL": settings["info"]}
            slot = self._crew.spawn(name, settings["threads"], env, settings["cwd"])
            self._crew.send(slot, ["init", {**settings["runner"], "mark": self._token}], self._hooks)
            if self._leaving is not None:
                self._crew.send(slot, ["notice", max(0.0, self._leaving - time.monotonic())])

    def _ended(self, slot: RunnerSlot, status: int) -> None:
        """A runner is gone: its calls are settled, and another one is made."""
        oom = status == -signal.SIGKILL and self._vitals.out_of_memory()
        started = [t for t in slot.inflight.values() if t.started is not None]
        culprits = sum(t.stop is None for t in started)
        for task in started:
            if task.stop is None:
                about = {"code": status, "stderr": slot.stderr_tail(), "oom": oom, "shared": culprits - 1}
                self._finish(task, "crashed", about)
            else:
                self._finish(task, task.stop, {"reason": "another call in its process had to be killed"})
        for task in reversed(list(slot.inflight.values())):
            if task.stop is not None:
                self._finish(task, task.stop, {})
                continue
            task.slot, task.shifting = None, False  # it had not begun: the next runner takes it
            self._queue[task.id] = task
            self._queue.move_to_end(task.id, last=False)
        if not slot.retired and not slot.failed and not self._closing:
            self._replace(slot, status)
        self._leave_if_done()

    def _replace(self, slot: RunnerSlot, status: int) -> None:
        if not slot.ready:
            self._failed_spawns += 1
            if self._failed_spawns >= _SPAWN_ATTEMPTS:
                text = f"a runner ended with status {status} before it was ready.\n{slot.stderr_tail()}"
                about = {"type": "", "message": text, "traceback": "", "generation": self._settings["generation"]}
                self._tell("failed", about, buffers=[b""])
        self._tell("replaced", {"generation": self._settings["generation"]})
        self._spawn_missing()

    def _heed(self, slot: RunnerSlot, kind: str, body: list[Any], buffers: list[Any]) -> None:
        """What a runner says."""
        if kind == "ready":
            self._on_ready(slot)
        elif kind == "failed":
            slot.failed = True
            self._crew.drain(slot)
            if not slot.retired:
                self._tell("failed", {**body[0], "generation": self._settings["generation"]}, buffers=buffers)
        elif kind == "recalled":
            task = self._tasks.get(body[0])
            if task is not None and task.stop is not None:
                self._finish(task, task.stop, {})
            elif task is not None and task.shifting:
                task.shifting, task.slot = False, None
                del slot.inflight[task.id]
                self._queue[task.id] = task
                self._pump()
            elif task is not None:
                del self._tasks[task.id], slot.inflight[task.id]
                self._tell("recalled", task.id)
        elif kind in ("out", "items", "want", "streaming"):
            self._crew.drain(slot)
            items: list[Any] = body[1] if kind == "items" else []
            self._freight.ship(str(body[0]), items, lambda: self._tell(kind, *body, buffers=buffers))
        else:
            task = self._tasks.get(body[0])
            if task is None:
                return
            self._crew.drain(slot)
            if kind == "exited":
                body[1]["stderr"] = slot.stderr_tail()
            if task.stop is None:
                self._finish(task, kind, body[1], buffers)
            else:
                self._finish(task, task.stop, body[1])
            if not slot.stopping:
                self._mark_started(slot)
            elif kind != "stopped":
                self._crew.kill(slot)  # the stop came too late, but may still hit whatever runs there next
            self._pump()
            if not slot.inflight and len(self._crew) > 1:
                self._shift()

    def _on_ready(self, slot: RunnerSlot) -> None:
        slot.ready = True
        self._failed_spawns = 0
        if all(s.ready for s in self._crew) and len(self._crew) == self._settings["processes"]:
            self._tell("ready", {"generation": self._settings["generation"], "pids": [s.pid for s in self._crew]})
        self._pump()
        self._shift()

    # output and vital signs

    def _output(self, slot: RunnerSlot, pipe: Pipe, data: bytes) -> None:
        if not self._home.connected and self._home.kept_bytes > _OUTPUT_LIMIT_ALONE:
            self._dropped += len(data)  # a body does not wait for a client that is away; the loss is told
            return
        if self._dropped:
            note = f"\n... {self._dropped:,} bytes of output were dropped while the client was away ...\n".encode()
            self._tell("out", pipe.stream, None, buffers=[note])
            self._dropped = 0
        if slot.threads > 1:
            self._tell("out", pipe.stream, None, buffers=[data])
            return
        for call, piece in pipe.take_apart(data, self._mark):
            if call not in slot.inflight:
                first = next(iter(slot.inflight.values()), None)
                call = first.id if first is not None and first.started is not None else None
            self._tell("out", pipe.stream, call, buffers=[piece])

    def _output_full(self) -> bool:
        return self._home.connected and self._home.kept_bytes > _OUTPUT_LIMIT

    def _sample(self) -> None:
        self._timers.after(_SAMPLE, self._sample)
        self._home.acknowledge()
        self._heard(self._home.heard)
        if self._home.connected:
            running = sum(t.started is not None for s in self._crew for t in s.inflight.values())
            cpu, memory = self._vitals.sample([s.pid for s in self._crew if s.pid])
            self._tell("sample", {"cpu": cpu, "memory": memory, "running": running})

    def _announce(self) -> None:
        """Says which calls have been running for a while; short ones are not worth a message."""
        now = time.monotonic()
        while self._recent and (self._recent[0].started or 0) + _ANNOUNCE <= now:
            task = self._recent.popleft()
            if self._tasks.get(task.id) is task:
                self._tell("started", task.id)

    def _wait(self) -> float:
        due = self._timers.due()
        if self._recent:
            due = min(due, (self._recent[0].started or 0) + _ANNOUNCE)
        return max(0.0, due - time.monotonic())

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # full: it will wake anyway
