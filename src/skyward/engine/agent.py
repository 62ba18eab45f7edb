"""One node: takes calls from the client, hands them to runners, sends home what they make. Never runs user code.

    client <==TLS link==> Agent thread <==sockets, pipes==> runners (forked by the nursery)
                          main thread: dask worker (membership; users' own dask work)

The agent forwards payloads as bytes. It keeps results and output until the client has acknowledged them, so a client
that loses its connection misses nothing. Decisions about a single runner are in `slots.py`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import queue
import selectors
import signal
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from skyward.engine.link import Broken, Link, greet, tune
from skyward.engine.slots import Pipe, RunnerSlot, Task, ahead
from skyward.engine.vitals import Vitals

__all__ = ["Agent"]

_ANNOUNCE = 0.05
_SAMPLE = 1.0
_GREETING = 10.0
_OUTPUT_LIMIT = 8 << 20
_OUTPUT_LIMIT_ALONE = 64 << 20
_SPAWN_ATTEMPTS = 3


class Agent:
    """Serves the pool's client on `listener` until it says bye."""

    def __init__(
        self,
        node: int,
        listener: socket.socket,
        context: ssl.SSLContext,
        nursery: socket.socket,
        join: Callable[[str], None],
        about: dict[str, Any],
    ) -> None:
        self._node, self._listener, self._context, self._nursery = node, listener, context, nursery
        self._join, self._about = join, about
        self._incarnation = os.urandom(8).hex()
        self._link = Link()
        self._session: str | None = None
        self._selector = selectors.DefaultSelector()
        self._admitted: queue.SimpleQueue[tuple[ssl.SSLSocket, dict[str, Any]]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._settings: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._generation = 0
        self._runners: dict[str, RunnerSlot] = {}
        self._dying: dict[str, RunnerSlot] = {}
        self._names = itertools.count()
        self._failed_spawns = 0
        self._queue: OrderedDict[str, Task] = OrderedDict()
        self._tasks: dict[str, Task] = {}
        self._recent: deque[Task] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_ids = itertools.count()
        self._outgoing: list[Any] = []
        self._outgoing_buffers: list[Any] = []
        self._mean: float | None = None
        self._dropped = 0
        self._vitals = Vitals()
        self._closing = False
        self._done = False

    def run(self) -> None:
        """Runs until the client says bye, then returns."""
        self._nursery.setblocking(False)
        self._selector.register(self._nursery, selectors.EVENT_READ, self._on_nursery)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        threading.Thread(target=self._accept, name="skyward-accept", daemon=True).start()
        self._after(_SAMPLE, self._sample)
        hot = False
        while not self._done:
            for key, events in self._selector.select(0 if hot else self._wait()):
                key.data(events)
            hot = self._on_client(0) if hot else False
            hot = hot or self._more
            self._more = False
            self._run_timers()
            self._announce()
            self._flush()

    _more = False

    def say(self, kind: str, body: Any) -> None:
        """Sends a message to the client, from any thread of this process."""
        self._link.post([[kind, body, 0]])
        self._wake()

    # the client's connection

    def _accept(self) -> None:
        """Admits connections; in a thread of its own, so that a slow or hostile peer delays nobody."""
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(raw,), daemon=True).start()

    def _admit(self, raw: socket.socket) -> None:
        try:
            raw.settimeout(_GREETING)
            tune(raw)
            sock = self._context.wrap_socket(raw, server_side=True)
            hello = greet(sock, None, time.monotonic() + _GREETING)
        except (OSError, ValueError):
            raw.close()  # not one of this pool: no certificate, or no greeting
            return
        self._admitted.put((sock, hello))
        self._wake()

    def _on_wake(self, _: int) -> None:
        try:
            self._wake_read.recv(4096)
        except BlockingIOError:
            pass
        while not self._admitted.empty():
            self._attach(*self._admitted.get())

    def _attach(self, sock: ssl.SSLSocket, hello: dict[str, Any]) -> None:
        self._detach()
        if hello["session"] != self._session:
            self._session = hello["session"]
            self._link = Link()
        greeting = {"incarnation": self._incarnation, "received": self._link.received, **self._about}
        try:
            from skyward.wire import encode

            for piece in encode(greeting):
                sock.sendall(piece)
            self._link.attach(sock, hello["received"])
        except OSError:
            sock.close()
            return
        self._selector.register(sock, selectors.EVENT_READ, self._on_client)
        self._more = True  # bytes may already have been decrypted

    def _detach(self) -> None:
        sock = self._link.sock
        if sock is not None:
            self._selector.unregister(sock)
            self._link.detach()

    def _on_client(self, events: int) -> bool:
        link, sock = self._link, self._link.sock
        if sock is None:
            return False
        if events & selectors.EVENT_WRITE:
            link.flush()
        try:
            arrived, more = link.read()
        except Broken:
            self._selector.unregister(sock)
            return False
        for messages, buffers in arrived:
            at = 0
            for message in messages:
                count = message[-1]
                self._obey(message[0], message[1:-1], buffers[at : at + count])
                at += count
        if link.sock is None:
            self._selector.unregister(sock)
        self._more = self._more or more
        self._watch_output()
        return more

    def _flush(self) -> None:
        if self._outgoing:
            messages, self._outgoing = self._outgoing, []
            buffers, self._outgoing_buffers = self._outgoing_buffers, []
            self._link.post(messages, buffers)
        sock = self._link.sock
        if sock is not None and sock.fileno() >= 0:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.writing else 0)
            if self._selector.get_key(sock).events != wanted:
                self._selector.modify(sock, wanted, self._on_client)

    def _tell(self, kind: str, *body: Any, buffers: list[Any] | None = None) -> None:
        self._outgoing.append([kind, *body, len(buffers) if buffers else 0])
        if buffers:
            self._outgoing_buffers += buffers

    # what the client says

    def _obey(self, kind: str, body: list[Any], buffers: list[Any]) -> None:
        if kind == "call":
            task = Task(body[0], body[1], buffers)
            self._tasks[task.id] = self._queue[task.id] = task
            self._pump()
        elif kind == "setup":
            self._setup(body[0], buffers)
        elif kind == "recall":
            self._recall(body[0])
        elif kind == "cancel":
            self._cancel(body[0], body[1], body[2])
        elif kind == "ports":
            self._tell("ports", _free_ports(self._listener.getsockname()[0], body[0]))
        elif kind == "bye":
            self._close(body[0])
        else:  # stream control, for the runner that has the call
            task = self._tasks.get(body[0])
            if task is not None:
                if task.slot is None:
                    task.backlog.append(([kind, *body], buffers))
                else:
                    self._to_runner(task.slot, [kind, *body], buffers)

    def _setup(self, settings: dict[str, Any], buffers: list[Any]) -> None:
        """(Re)makes every runner, with the pool's current view of itself and the plugins' hooks."""
        self._settings, self._hooks = settings, buffers
        self._generation = settings["generation"]
        self._failed_spawns = 0
        if settings.get("scheduler"):
            self._join(settings["scheduler"])
        for task in list(self._tasks.values()):
            if task.slot is not None:
                self._finish(task, "lost", {"reason": "the node's processes were replaced"})
        for slot in list(self._runners.values()):
            self._retire(slot)
        self._spawn_missing()

    def _recall(self, call_id: str) -> None:
        task = self._queue.pop(call_id, None)
        if task is not None:
            del self._tasks[call_id]
            self._tell("recalled", call_id)
            return
        task = self._tasks.get(call_id)
        if task is not None and task.slot is not None:
            self._to_runner(task.slot, ["recall", call_id])

    def _cancel(self, call_id: str, why: str, grace: float) -> None:
        task = self._tasks.get(call_id)
        if task is None:
            return  # it has ended meanwhile; its result is on the way
        if task.slot is None:
            del self._queue[call_id]
            self._finish(task, why, {})
        else:
            self._stop(task, why, grace)

    def _close(self, grace: float) -> None:
        self._closing = True
        self._queue.clear()
        for slot in self._runners.values():
            if slot.inflight or not slot.ready:
                self._kill(slot, signal.SIGKILL)
            else:
                self._to_runner(slot, ["exit", None])
        self._after(grace, self._give_up)
        self._end_if_done()

    def _give_up(self) -> None:
        for slot in [*self._runners.values(), *self._dying.values()]:
            self._kill(slot, signal.SIGKILL)
        self._after(1.0, self._leave)

    def _leave(self) -> None:
        self._done = True

    def _end_if_done(self) -> None:
        if self._closing and not self._runners and not self._dying:
            self._tell("bye")
            self._flush()
            self._done = True

    # calls and runners

    def _pump(self) -> None:
        """Gives waiting calls to runners that have room."""
        while self._queue:
            slot = self._roomy()
            if slot is None:
                return
            _, task = self._queue.popitem(last=False)
            task.slot = slot
            slot.inflight[task.id] = task
            self._to_runner(slot, ["call", task.id, task.about], task.buffers)
            for message, buffers in task.backlog:
                self._to_runner(slot, message, buffers)
            task.backlog.clear()
            self._mark_started(slot)

    def _roomy(self) -> RunnerSlot | None:
        best: RunnerSlot | None = None
        for slot in self._runners.values():
            if slot.ready and not slot.stopping and (best is None or len(slot.inflight) < len(best.inflight)):
                best = slot
        if best is None or len(best.inflight) >= best.threads + ahead(self._mean, best.threads):
            return None
        return best

    def _mark_started(self, slot: RunnerSlot) -> None:
        """Runners take calls in order: the first `threads` of them are running."""
        now = time.monotonic()
        for task in itertools.islice(slot.inflight.values(), slot.threads):
            if task.started is None:
                task.started = now
                self._recent.append(task)
                slot.stderr_mark()
                limit = task.about.get("timeout")
                if limit is not None:
                    self._after(limit, lambda t=task, s=limit: self._time_out(t, s))

    def _time_out(self, task: Task, seconds: float) -> None:
        if self._tasks.get(task.id) is task and task.stop is None:
            task.about["limit"] = seconds
            self._stop(task, "timeout", self._settings["grace"])

    def _stop(self, task: Task, why: str, grace: float) -> None:
        """Ends a call that may be running: asks, waits `grace`, kills."""
        slot = task.slot
        assert slot is not None
        if task.stop is None:
            task.stop = why
            if slot.threads == 1:
                slot.stopping = True
            self._to_runner(slot, ["stop", task.id])
            self._after(grace, lambda: self._kill_for(task, slot))

    def _kill_for(self, task: Task, slot: RunnerSlot) -> None:
        if self._tasks.get(task.id) is task and task.slot is slot:
            task.about["killed"] = True
            for other in slot.inflight.values():
                if other.stop is None and other.started is not None:
                    other.stop = "lost"  # it only shared the process
            self._kill(slot, signal.SIGKILL)

    def _kill(self, slot: RunnerSlot, number: int) -> None:
        self._order({"kill": slot.name, "signal": int(number)})

    def _finish(self, task: Task, kind: str, about: dict[str, Any], buffers: list[Any] | None = None) -> None:
        """The one place where a call ends on this node."""
        if self._tasks.pop(task.id, None) is None:
            return
        if task.slot is not None:
            task.slot.inflight.pop(task.id, None)
        if task.started is not None:
            seconds = about.setdefault("s", time.monotonic() - task.started)
            self._mean = seconds if self._mean is None else 0.8 * self._mean + 0.2 * seconds
        about["announced"] = task.announced
        if kind == "timeout":
            about |= {"limit": task.about["limit"], "killed": task.about.get("killed", False)}
        self._tell(kind, task.id, about, buffers=buffers)
        task.buffers = []

    def _spawn_missing(self) -> None:
        settings = self._settings
        wanted = settings["processes"]
        while len(self._runners) < wanted and not self._closing:
            if self._failed_spawns >= _SPAWN_ATTEMPTS:
                return
            self._spawn()

    def _spawn(self) -> None:
        settings = self._settings
        ours, theirs = socket.socketpair()
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        name = f"{self._generation}-{next(self._names)}"
        env = {**settings["env"], "COMPUTE_POOL": settings["info"]}
        try:
            order = json.dumps({"spawn": name, "env": env, "cwd": settings["cwd"]}).encode()
            self._nursery.setblocking(True)
            socket.send_fds(self._nursery, [order], [theirs.fileno(), out_write, err_write])
        except OSError:
            pass  # the nursery is gone; the keeper ends this agent and starts anew
        finally:
            self._nursery.setblocking(False)
            theirs.close()
            os.close(out_write)
            os.close(err_write)
        slot = RunnerSlot(name, ours, settings["threads"], Pipe("stdout", out), Pipe("stderr", err))
        self._runners[name] = slot
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, lambda events, s=slot: self._on_runner(s, events))
        for pipe in (slot.out, slot.err):
            os.set_blocking(pipe.fd, False)
            self._selector.register(pipe.fd, selectors.EVENT_READ, lambda _, s=slot, p=pipe: self._on_output(s, p))
        keys = ("threads", "paths", "blobs", "max_result", "node")
        self._to_runner(slot, ["init", {k: settings[k] for k in keys}], self._hooks)

    def _retire(self, slot: RunnerSlot) -> None:
        self._runners.pop(slot.name, None)
        self._dying[slot.name] = slot
        slot.retired = True
        self._kill(slot, signal.SIGKILL)

    def _on_nursery(self, _: int) -> None:
        while True:
            try:
                data = self._nursery.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                os._exit(3)  # without a nursery there are no runners; the keeper starts this agent again
            message = json.loads(data)
            if "pid" in message:
                slot = self._runners.get(message["id"]) or self._dying.get(message["id"])
                if slot is not None:
                    slot.pid = message["pid"]
            else:
                slot = self._runners.get(message["exit"]) or self._dying.get(message["exit"])
                if slot is not None:
                    self._on_exit(slot, message["status"])

    def _on_exit(self, slot: RunnerSlot, status: int) -> None:
        """A runner has ended: what it still said is heard first, then its calls are settled."""
        self._on_runner(slot, selectors.EVENT_READ)
        self._drain_output(slot, final=True)
        for fileobj in (slot.sock, slot.out.fd, slot.err.fd):
            if fileobj in self._selector.get_map():
                self._selector.unregister(fileobj)
        slot.close()
        self._runners.pop(slot.name, None)
        self._dying.pop(slot.name, None)
        oom = status == -signal.SIGKILL and self._vitals.out_of_memory()
        started = [t for t in slot.inflight.values() if t.started is not None]
        culprits = sum(t.stop is None for t in started)
        for task in started:
            if task.stop is not None:
                about = {"reason": "another call in its process was stopped"} if task.stop == "lost" else {}
                self._finish(task, task.stop, about)
            else:
                about = {"code": status, "stderr": slot.stderr_tail(), "oom": oom, "shared": culprits - 1}
                self._finish(task, "crashed", about)
        for task in reversed(list(slot.inflight.values())):
            task.slot = None  # it had not begun: the next runner takes it
            self._queue[task.id] = task
            self._queue.move_to_end(task.id, last=False)
        slot.inflight.clear()
        if not slot.retired and not self._closing:
            if not slot.ready:
                self._failed_spawns += 1
                if self._failed_spawns >= _SPAWN_ATTEMPTS and not slot.failed:
                    text = f"a runner ended with status {status} before it was ready.\n{slot.stderr_tail()}"
                    self._tell("failed", {"type": "", "message": text, "traceback": ""}, buffers=[b""])
            if not slot.failed:
                self._tell("replaced", {"generation": self._generation})
                self._spawn_missing()
        self._end_if_done()

    def _on_runner(self, slot: RunnerSlot, events: int) -> None:
        if events & selectors.EVENT_WRITE and slot.flush():
            self._selector.modify(slot.sock, selectors.EVENT_READ, lambda events, s=slot: self._on_runner(s, events))
        for messages, buffers in slot.read():
            at = 0
            for message in messages:
                count = message[-1]
                self._heed(slot, message[0], message[1:-1], buffers[at : at + count])
                at += count
        if slot.eof and slot.sock in self._selector.get_map():
            self._selector.unregister(slot.sock)

    def _heed(self, slot: RunnerSlot, kind: str, body: list[Any], buffers: list[Any]) -> None:
        """What a runner says."""
        if kind == "ready":
            slot.ready = True
            self._failed_spawns = 0
            if all(s.ready for s in self._runners.values()) and len(self._runners) == self._settings["processes"]:
                self._tell("ready", {"generation": self._generation, "pids": [s.pid for s in self._runners.values()]})
            self._pump()
        elif kind == "failed":
            slot.failed = True
            self._drain_output(slot)
            self._tell("failed", body[0], buffers=buffers)
        elif kind == "out":
            self._tell("out", body[0], body[1], buffers=buffers)
        elif kind in ("items", "want", "streaming"):
            self._drain_output(slot)
            self._tell(kind, *body, buffers=buffers)
        elif kind == "recalled":
            task = self._tasks.pop(body[0], None)
            if task is not None:
                slot.inflight.pop(task.id, None)
                self._tell("recalled", task.id)
        else:
            task = self._tasks.get(body[0])
            if task is None:
                return
            self._drain_output(slot)
            if task.stop is not None:
                kind, buffers = task.stop, []
            self._finish(task, kind, body[1], buffers)
            if not slot.stopping:
                self._mark_started(slot)
            self._pump()

    def _to_runner(self, slot: RunnerSlot, message: list[Any], buffers: list[Any] | None = None) -> None:
        if slot.eof:
            return
        if not slot.send([[*message, len(buffers) if buffers else 0]], buffers or []):
            self._selector.modify(
                slot.sock,
                selectors.EVENT_READ | selectors.EVENT_WRITE,
                lambda events, s=slot: self._on_runner(s, events),
            )

    def _order(self, order: dict[str, Any]) -> None:
        try:
            self._nursery.send(json.dumps(order).encode())
        except OSError:
            pass  # as in _spawn

    # output

    def _on_output(self, slot: RunnerSlot, pipe: Pipe) -> None:
        if self._output_full():
            self._pause(slot, pipe)
            return
        self._forward(slot, pipe)

    def _forward(self, slot: RunnerSlot, pipe: Pipe) -> bool:
        data = pipe.read()
        if data is None:
            return False
        if not data:
            if pipe.fd in self._selector.get_map():
                self._selector.unregister(pipe.fd)
            return False
        task = next(iter(slot.inflight.values()), None) if slot.threads == 1 else None
        call = task.id if task is not None and task.started is not None else None
        if self._link.sock is None and self._link.kept_bytes > _OUTPUT_LIMIT_ALONE:
            self._dropped += len(data)  # a body does not wait for a client that is away; the loss is told
            return True
        if self._dropped:
            note = f"\n... {self._dropped:,} bytes of output were dropped while the client was away ...\n".encode()
            self._tell("out", pipe.stream, call, buffers=[note])
            self._dropped = 0
        self._tell("out", pipe.stream, call, buffers=[data])
        return True

    def _drain_output(self, slot: RunnerSlot, *, final: bool = False) -> None:
        for pipe in (slot.out, slot.err):
            while pipe.open and self._forward(slot, pipe):
                pass

    def _output_full(self) -> bool:
        return self._link.sock is not None and self._link.kept_bytes > _OUTPUT_LIMIT

    def _pause(self, slot: RunnerSlot, pipe: Pipe) -> None:
        if pipe.fd in self._selector.get_map():
            self._selector.unregister(pipe.fd)
            pipe.paused = True

    def _watch_output(self) -> None:
        if self._output_full():
            return
        for slot in self._runners.values():
            for pipe in (slot.out, slot.err):
                if pipe.paused and pipe.open:
                    pipe.paused = False
                    self._selector.register(
                        pipe.fd, selectors.EVENT_READ, lambda _, s=slot, p=pipe: self._on_output(s, p)
                    )

    # time

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._timer_ids), act))

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _announce(self) -> None:
        """Says which calls have been running for a while; short ones are not worth a message."""
        now = time.monotonic()
        while self._recent and (self._recent[0].started or 0) + _ANNOUNCE <= now:
            task = self._recent.popleft()
            if self._tasks.get(task.id) is task and not task.announced:
                task.announced = True
                self._tell("started", task.id)

    def _wait(self) -> float:
        due = self._timers[0][0]
        if self._recent:
            due = min(due, (self._recent[0].started or 0) + _ANNOUNCE)
        return max(0.0, due - time.monotonic())

    def _sample(self) -> None:
        self._after(_SAMPLE, self._sample)
        self._link.acknowledge()
        if self._link.sock is not None:
            running = sum(t.started is not None for s in self._runners.values() for t in s.inflight.values())
            cpu, memory = self._vitals.sample([s.pid for s in self._runners.values() if s.pid])
            self._tell("sample", {"cpu": cpu, "memory": memory, "running": running})
        self._watch_output()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # full: it will wake anyway


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody uses on this node's address at the moment."""
    taken = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in taken]
    for sock in taken:
        sock.close()
    return ports
