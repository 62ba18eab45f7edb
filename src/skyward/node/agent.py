"""One node: takes calls from the client, hands them to runners, sends results back. Never runs user code.

Passes events to `AgentCalls` and carries out its actions. Results and output are kept until acknowledged.
"""

from __future__ import annotations

import logging
import math
import os
import pkgutil
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, assert_never, cast

from skyward.api.hardware import Gpu, seen_by_one_process
from skyward.api.info import VARIABLE, InstanceInfo
from skyward.node.agent_calls import AgentCalls
from skyward.node.agent_slots import Action, Drop, Kill, NodeCall, Remove, Send, Slot, Spawn, Tell
from skyward.node.blob_cache import BlobCache
from skyward.node.client_link import ClientLink, ClientListener
from skyward.node.files import NodeFiles
from skyward.node.gpu_shares import names, variable
from skyward.node.gpus import look
from skyward.node.orders import UNANSWERED
from skyward.node.protocol import (
    AgentToClient,
    AgentToRunner,
    ClientToAgent,
    Close,
    Exited,
    Files,
    Forget,
    Grant,
    Info,
    InputEnd,
    InputItems,
    Recall,
    Returned,
    Run,
    RunnerToAgent,
    Verdict,
    output_cost,
)
from skyward.node.runners import Ended, Event, Pipe, Printed, RunnerProcess, Runners, Said, StackSampler, Stream
from skyward.node.settings import AgentOrder, Greeting, NodeSettings, RunnerSettings, SetupSettings, system
from skyward.node.shared.agent_side import Shared
from skyward.node.terms import Terms, TermsSlot
from skyward.node.timers import Timers
from skyward.node.usage import UsageMeter
from skyward.transport.codec import Buffers, Message, Receiver, handles
from skyward.transport.frames import encode
from skyward.transport.records import replace as changed
from skyward.transport.roles import node_role

if TYPE_CHECKING:
    import ssl

    from skyward.node.gpu_meter import GpuMeter
    from skyward.node.terms import TermsSlot

if TYPE_CHECKING:
    from skyward.node.gpu_meter import GpuMeter

__all__ = ["Agent", "Dependencies", "OutputRelay", "info_at", "run_agent", "variables"]


log = logging.getLogger("skyward.engine")

_SAMPLE = 1.0
_UNANSWERED = 60  # samples


@dataclass(frozen=True)
class Dependencies:
    clock: Callable[[], float] = time.monotonic
    token: Callable[[], str] = lambda: os.urandom(8).hex()
    selector: Callable[[], selectors.BaseSelector] = selectors.DefaultSelector
    runners: type[Runners] = Runners
    usage: type[UsageMeter] = UsageMeter
    gpus: Callable[[], GpuMeter | None] = lambda: None
    dial: Callable[[str, int], socket.socket] = socket.create_connection  # pyright: ignore - two arguments


class Agent:
    def __init__(
        self,
        listener: Callable[[Callable[[], None], Callable[[socket.socket, str], None]], ClientListener],
        fork_server: socket.socket,
        slot: TermsSlot,
        blob_cache: BlobCache,
        greeting: Greeting,
        dependencies: Dependencies | None = None,
    ) -> None:
        self._slot, self._blob_cache = slot, blob_cache
        self._drain_at = math.inf  # when bodies are told that the pool's time is nearly over
        around = dependencies or Dependencies()
        self._clock, self._token, self._usage = around.clock, around.token(), around.usage()
        self._selector, self._gpus = around.selector(), around.gpus()
        self._calls, self._timers = AgentCalls(), Timers(self._clock)
        self._runners = around.runners(self._selector, fork_server)
        tell: Callable[[Message], None] = lambda message: self._tell(message)  # noqa: E731 - the link is made below
        sampler = StackSampler(self._calls, self._runners, self._usage, self._timers, tell)
        node, send, timers = greeting.get("node", 0), self._runners.send, self._timers
        self._shared = Shared(node, self._token, self._selector, self._clock, timers, send, around.dial, self._wake)
        self._mark = b"\0" + self._token.encode()
        self._output = OutputRelay(self._calls.slots, self._mark, self._clock)
        forwarding = Forwarding(self._calls, blob_cache, self._runners.send_all, self._do, tell)
        self._files = NodeFiles(blob_cache, self._wake, tell)
        owners = (self, forwarding, sampler, self._shared, self._output, self._files)
        hear_client = Receiver(ClientToAgent, *owners).receive_all
        self._home = ClientLink(self._selector, greeting, hear_client, self._fence, around.token(), self._clock)
        self._tell, self._output.home = self._home.tell, self._home
        self._shared.tell = self._tell
        self._listener, blob_cache.wake = listener(self._wake, blob_cache.serve), self._wake
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        hear_runner = Receiver(RunnerToAgent, self, sampler, self._shared).receive_all
        self._handlers: dict[Any, Any] = {Said: hear_runner, Printed: self._output.written, Ended: self._ended}
        self._settings: SetupSettings | None = None
        self._hooks: Buffers = ()
        self._done = False
        self._notices: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._leaving: float | None = None  # when this machine will be taken away

    def run(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._listener.open()
        self._timers.after(_SAMPLE, self._sample)
        while not self._done:
            more = self._home.pending() | self._shared.pending()
            for key, events in self._selector.select(0 if more else self._wait()):
                self.handle(key.data(events) or ())
            if more:
                self._home.read(0)
            self.turn()

    def turn(self) -> None:
        self._timers.run()
        self._pass_time(self._clock())
        self._runners.flush()
        self._blob_cache.send(lambda: self._home.kept_bytes, self._home.tell_now)
        self._home.flush()
        self._runners.full = self._output.full()
        self._runners.resume()

    def notice(self, seconds: float) -> None:
        """Thread-safe."""
        self._notices.put(seconds)
        self._wake()

    # doing what AgentCalls says

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:  # the frequent ones first
                case Tell():
                    self._do_tell(action.message)
                case Send():
                    message = action.message
                    if isinstance(message, Run):
                        self._usage.refresh()
                        if "blobs" in message.header and not self._blob_cache.shared:
                            self._blob_cache.locate(message.header["blobs"])
                    self._runners.send(action.slot.name, message)
                case Drop():
                    self._blob_cache.drop(action.digests)
                case Remove():
                    self._blob_cache.remove(action.paths)
                case Kill():
                    self._runners.kill(action.slot.name)
                case Spawn():
                    self._spawn(action.slot)
                case _:
                    assert_never(action)

    def _do_tell(self, message: Message) -> None:
        """The end of a call goes after its result's blobs."""
        if isinstance(message, Returned) and message.kept is not None:
            self._blob_cache.keep(message.blobs)
        elif isinstance(message, Returned) and message.blobs:
            files: Files = {"blobs": message.blobs}
            told = lambda: self._tell(changed(message, incomplete=files.get("incomplete")))  # noqa: E731
            self._blob_cache.ship(message.id, [files], told)
            return
        elif isinstance(message, Verdict):
            self._blob_cache.ship(message.id, [], lambda: self._tell(message))
            return
        self._tell(message)

    def _spawn(self, slot: Slot) -> None:
        settings, place = self._settings, slot.place
        assert settings is not None, "only then are there runners"
        self._runners.spawn(slot.name, slot.threads, variables(settings, place), settings["cwd"])
        runner: RunnerSettings = {**settings["runner"], "mark": self._token}
        self._runners.send(slot.name, AgentToRunner.Init(runner, self._hooks))
        if self._leaving is not None:
            self._runners.send(slot.name, AgentToRunner.Notice(max(0.0, self._leaving - self._clock())))

    def _pass_time(self, now: float) -> None:
        if now < self._calls.due():
            return
        for name in self._calls.pages_due(now):
            self._read_page(name, now)
        self._do(self._calls.tick(now))

    def _read_page(self, name: str, now: float) -> None:
        self._do(self._calls.saw(name, self._runners.status(name), now))

    # the client's connection

    def _on_wake(self, _: int) -> None:
        try:
            self._wake_read.recv(4096)
        except BlockingIOError:
            pass
        self.poll()

    def poll(self) -> None:
        while (admitted := self._listener.next()) is not None:
            if "terms" in admitted[1]:
                self._take_terms(*admitted)
            else:
                (self._shared.admit if "share" in admitted[1] else self._home.attach)(*admitted)
        self._shared.poll()
        self._files.poll()
        while not self._blob_cache.arrivals.empty():
            name, good = self._blob_cache.arrivals.get()
            if good:
                self._do(self._calls.arrived(name, self._clock()))
            else:
                self._tell(AgentToClient.Need(name))
        while not self._notices.empty():
            self._on_notice(self._notices.get())

    def _take_terms(self, sock: socket.socket, word: dict[str, Any]) -> None:
        """A new epoch ends the previous driver's connection."""
        now, before = self._clock(), self._slot.terms.epoch
        deadline = now + word["left"]
        self._slot.take(Terms(now, deadline, ending=word["end"], epoch=word["terms"], serial=word["serial"]))
        if word["terms"] > before:
            self._home.drop()
            self._listener.since = word["by"]
        self._drain_at = self._slot.terms.deadline - word["drain"]
        try:
            for piece in encode({"terms": self._slot.terms.epoch}):
                sock.sendall(piece)
        except OSError:
            pass  # it asks again
        sock.close()

    def _fence(self) -> None:
        """The client gave this node up and may have restarted its calls elsewhere: all of them must end."""
        self._blob_cache.abandon()
        self._shared.fence()
        self._output.fence()
        self._do(self._calls.fence(self._clock()))
        if self._leaving is not None:
            self._tell(AgentToClient.Notice(max(0.0, self._leaving - self._clock())))

    # what the client sends

    @handles(Run)
    def _run(self, message: Run) -> None:
        header = message.header
        call = NodeCall(message.id, header, message.buffers)
        needed = header.get("blobs")
        if needed and not self._blob_cache.shared:
            call.digests = [name for name, _ in needed.values()]
            header["blobs"], call.missing = self._blob_cache.take(needed)
            for name in sorted(call.missing):
                if not self._blob_cache.coming(name):
                    self._tell(AgentToClient.Need(name))
        self._do(self._calls.take(call, self._clock()))

    @handles(Recall)
    def _recall(self, message: Recall) -> None:
        self._do(self._calls.recall(message.id, self._clock()))

    @handles(ClientToAgent.Cancel)
    def _cancel(self, message: ClientToAgent.Cancel) -> None:
        now = self._clock()
        call = self._calls.calls.get(message.id)
        if call is not None and call.slot is not None:
            self._read_page(call.slot.name, now)
        self._do(self._calls.cancel(message.id, message.reason, message.grace, now))

    @handles(ClientToAgent.Ask)
    def _ask(self, message: ClientToAgent.Ask) -> None:
        """Calls whose results are still being sent are not unknown."""
        for name in list(self._calls.slots):
            self._read_page(name, self._clock())
        states = self._calls.states(message.ids) | {id: "ended" for id in message.ids if self._blob_cache.shipping(id)}
        self._tell(AgentToClient.States(states))

    @handles(ClientToAgent.Expect)
    def _expect(self, message: ClientToAgent.Expect) -> None:
        self._blob_cache.expect(message.blob)

    @handles(ClientToAgent.Unexpect)
    def _unexpect(self, message: ClientToAgent.Unexpect) -> None:
        self._blob_cache.unexpect(message.blob)

    @handles(ClientToAgent.Blob)
    def _blob(self, message: ClientToAgent.Blob) -> None:
        name, size = message.name, message.size
        try:
            if self._blob_cache.accept(name, message.offset, size, message.buffers[0]):
                self._do(self._calls.arrived(name, self._clock()))
        except OSError as exc:  # the disk is full: the calls that need the buffer cannot run here
            self._do(self._calls.no_room(name, size, str(exc.strerror), self._clock()))

    @handles(ClientToAgent.Fetch)
    def _fetch(self, message: ClientToAgent.Fetch) -> None:
        self._blob_cache.fetch(message.blob, message.size, message.addresses)

    @handles(ClientToAgent.Setup)
    def _set_up(self, message: ClientToAgent.Setup) -> None:
        now, settings = self._clock(), message.settings
        self._settings, self._hooks = settings, message.buffers
        self._shared.head, self._shared.info = settings.get("head"), settings["info"]
        self._blob_cache.shared, self._output.window = settings["shared"], settings["output"]
        self._files.cwd = settings["cwd"]
        if self._gpus:
            self._gpus.watch(settings["gpus"])
        for name in list(self._calls.slots):
            self._read_page(name, now)
        self._do(self._calls.setup(settings, bool(message.buffers), now))

    @handles(Info)
    def _info(self, message: Info) -> None:
        if self._settings is not None:
            self._settings["info"] = self._shared.info = message.info
            for slot in self._calls.slots.values():
                self._runners.send(slot.name, Info(info_at(self._settings, slot.place)))

    @handles(ClientToAgent.Terms)
    def _terms(self, message: ClientToAgent.Terms) -> None:
        now = self._clock()
        self._slot.take(Terms(deadline=now + message.left, epoch=self._slot.terms.epoch, serial=message.serial))
        self._drain_at = now + message.left - message.drain

    @handles(ClientToAgent.Ports)
    def _ports(self, message: ClientToAgent.Ports) -> None:
        self._tell(AgentToClient.Ports(self._listener.free_ports(message.count), message.generation))

    @handles(ClientToAgent.Bye)
    def _close(self, message: ClientToAgent.Bye) -> None:
        self._shared.close()
        self._do(self._calls.close(self._clock()))
        self._timers.after(message.grace, self._runners.kill_all)
        self._timers.after(message.grace + 1.0, self._leave)
        self._leave_if_done()

    def _on_notice(self, seconds: float) -> None:
        now = self._clock()
        self._leaving = now + seconds
        self._tell(AgentToClient.Notice(seconds))
        self._runners.send_all(AgentToRunner.Notice(seconds))
        self._do(self._calls.notice(now))

    def _leave_if_done(self) -> None:
        if self._calls.closing and self._runners.gone:
            self._leave()

    def _leave(self) -> None:
        self._home.tell_now(AgentToClient.Bye())
        self._done = True

    # what runners send

    def handle(self, happened: Sequence[Event]) -> None:
        for event in happened:
            try:
                self._handlers[type(event)](*event)
            except Exception as exc:
                if not isinstance(event, Said):
                    raise
                log.warning("a runner is ended, since what it sent cannot be handled: %.200r", exc)
                self._runners.kill(event.runner.name)

    @handles(RunnerToAgent.Ready)
    def _runner_ready(self, message: RunnerToAgent.Ready, runner: RunnerProcess) -> None:
        self._do(self._calls.ready(runner.name, self._clock()))

    @handles(RunnerToAgent.Failed)
    def _runner_failed(self, message: RunnerToAgent.Failed, runner: RunnerProcess) -> None:
        self.handle(self._runners.drain(runner))
        if self._calls.failed(runner.name, self._clock()) and self._settings is not None:
            self._tell(AgentToClient.Failed(message.error, self._settings["generation"], message.buffers))

    @handles(RunnerToAgent.Recalled)
    def _given_back(self, message: RunnerToAgent.Recalled, runner: RunnerProcess) -> None:
        self._do(self._calls.returned(runner.name, [message.id], self._clock()))

    @handles(RunnerToAgent.Leaving)
    def _runner_leaving(self, message: RunnerToAgent.Leaving, runner: RunnerProcess) -> None:
        now = self._clock()
        self._read_page(runner.name, now)
        self._do(self._calls.left(runner.name, message.ids, now))

    @handles(Verdict)
    def _call_ended(self, verdict: Verdict, runner: RunnerProcess) -> None:
        self.handle(self._runners.drain(runner))
        self._output.say_left_out(call=verdict.id)
        if isinstance(verdict, Exited):
            verdict = changed(verdict, stderr=runner.stderr_tail(self._mark))
        self._do(self._calls.ended(runner.name, verdict, self._clock()))
        runner.new_call(self._mark)

    @handles(RunnerToAgent.Streaming)
    def _streaming(self, message: RunnerToAgent.Streaming, runner: RunnerProcess) -> None:
        self._pass_on(runner, message.id, [], message)

    @handles(RunnerToAgent.Items)
    def _items(self, message: RunnerToAgent.Items, runner: RunnerProcess) -> None:
        files = [item[1] for item in message.items if not isinstance(item, int)]
        self._pass_on(runner, message.id, files, message)

    @handles(RunnerToAgent.Want)
    def _wanted(self, message: RunnerToAgent.Want, runner: RunnerProcess) -> None:
        self._pass_on(runner, message.id, [], message)

    @handles(RunnerToAgent.Out)
    def _written(self, message: RunnerToAgent.Out, runner: RunnerProcess) -> None:
        self.handle(self._runners.drain(runner))
        self._output.said(runner, message.stream, message.id, message.buffers)

    def _pass_on(self, runner: RunnerProcess, id: str, files: list[Files], message: Message) -> None:
        """Sent after what the runner wrote before it."""
        self.handle(self._runners.drain(runner))
        self._blob_cache.ship(id, files, lambda: self._tell(message))

    def _ended(self, runner: RunnerProcess, status: int) -> None:
        now = self._clock()
        self._do(self._calls.saw(runner.name, runner.status.read(), now))
        oom, tail = status < 0 and self._usage.out_of_memory(), runner.stderr_tail(self._mark)
        self._runners.forget(runner)
        self._shared.ended(runner.name)
        self._do(self._calls.exited(runner.name, status, tail, oom, now))
        self._leave_if_done()

    # vital signs

    def _sample(self) -> None:
        self._timers.after(_SAMPLE, self._sample)
        self._home.acknowledge()
        self._slot.hear(self._home.heard)
        if self._leaving is None and self._clock() >= self._drain_at:
            self._on_notice(self._slot.terms.deadline - self._clock())
        unanswered = self._runners.unanswered()
        if unanswered > _UNANSWERED:
            self._leave_fork_server()
        found, actions = self._calls.audit(self._clock(), killable=not unanswered)  # looks for mistakes of its own
        self._do(actions)
        for text in found:
            log.warning("the agent repaired its own state: %s", text)
            self._tell(AgentToClient.Repaired(text))
        if self._home.connected:
            running = sum(call.began is not None for call in self._calls.calls.values())
            cpu, memory = self._usage.sample(self._runners.pids())
            gpus, notes = self._gpus.take() if self._gpus else ((), ())
            for note in notes:
                self._tell(AgentToClient.Gpus(*note))
            self._tell(AgentToClient.Sample(cpu, memory, running, [astuple(gpu) for gpu in gpus]))

    def _leave_fork_server(self) -> None:
        text = f"the fork server has not answered for {_UNANSWERED:.0f} s and is being replaced"
        self._home.tell_now(AgentToClient.Warning(f"{text}. What runs on this machine is lost."))
        self._home.flush()
        os._exit(UNANSWERED)

    def _wait(self) -> float:
        return max(0.0, min(self._timers.due(), self._calls.due()) - self._clock())

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # full: it will wake anyway


class Forwarding:
    def __init__(
        self,
        calls: AgentCalls,
        blobs: BlobCache,
        send_all: Callable[[Message], None],
        do: Callable[[list[Action]], None],
        tell: Callable[[Message], None],
    ) -> None:
        self._calls, self._blobs, self._send_all, self._do, self._tell = calls, blobs, send_all, do, tell

    @handles(Grant)
    def _grant(self, message: Grant) -> None:
        self._do(self._calls.stream(message.id, message))

    @handles(Close)
    def _close(self, message: Close) -> None:
        self._do(self._calls.stream(message.id, message))

    @handles(InputItems)
    def _items(self, message: InputItems) -> None:
        self._do(self._calls.stream(message.id, message))

    @handles(InputEnd)
    def _end(self, message: InputEnd) -> None:
        self._do(self._calls.stream(message.id, message))

    @handles(ClientToAgent.Bring)
    def _bring(self, message: ClientToAgent.Bring) -> None:
        self._blobs.bring(message.request, message.key, self._tell)

    @handles(Forget)
    def _forget(self, message: Forget) -> None:
        self._blobs.forget(message.keys)
        self._send_all(message)


def variables(settings: NodeSettings, place: int) -> dict[str, str]:
    return {**settings["env"], **settings["places"][place], VARIABLE: info_at(settings, place)}


def info_at(settings: NodeSettings, place: int) -> str:
    info = settings["info"]
    return info if place == 0 else replace(InstanceInfo.from_json(info), worker=place).to_json()


# The process of a node's agent.


_DIALLING = 10.0


def run_agent(
    order: AgentOrder, directory: str, listener: socket.socket, fork_server: socket.socket, slot: TermsSlot
) -> NoReturn:
    """Exits with 0 after the client's `bye`."""
    code = 1
    try:
        agent = _agent(order, directory, listener, fork_server, slot)
        if order["notices"]:
            threading.Thread(target=_wait_for_notice, args=(order["notices"], agent.notice), daemon=True).start()
        agent.run()
        code = 0
    except BaseException:
        log.exception("the agent of node %d failed", order["node"])
    finally:
        os._exit(code)


def _agent(
    order: AgentOrder, directory: str, listener: socket.socket, fork_server: socket.socket, slot: TermsSlot
) -> Agent:
    server = client = None
    if order["identity"] is not None:
        from skyward.transport.certificates import Identity, context

        identity = Identity(**order["identity"])
        server, client = context(identity, server=True), context(identity, server=False)
    found = look()
    called = names(found.gpus, os.environ)
    greeting: Greeting = {
        "node": order["node"],
        "python": list(sys.version_info[:3]),
        "path": sys.path,
        "hostname": os.uname().nodename,
        "system": system(),
        "pid": os.getpid(),
        "accelerators": seen_by_one_process(found.gpus),
        **cast("Greeting", found.to_json()),
        "gpu_names": called,
        "gpu_variable": variable(found.gpus),
        "cpus": len(os.sched_getaffinity(0)),
    }
    around = Dependencies(gpus=lambda: _gpu_meter(found.gpus, called), dial=partial(_dial, client))
    admit = partial(ClientListener, listener, order["host"], server, order["session"], slot)
    return Agent(admit, fork_server, slot, BlobCache(directory, client), greeting, around)


def _dial(context: ssl.SSLContext | None, host: str, port: int) -> socket.socket:
    from skyward.transport.certificates import secure

    assert context is not None, "runners of one computer connect to node 0 themselves"
    return secure(socket.create_connection((host, port), timeout=_DIALLING), context, _DIALLING, node_role(0))


def _gpu_meter(gpus: Sequence[Gpu], called: Sequence[str]) -> GpuMeter | None:
    if not gpus:
        return None
    from skyward.node.gpu_meter import GpuMeter

    return GpuMeter(gpus, called)


def _wait_for_notice(name: str, notice: Callable[[float], None]) -> None:
    notice(pkgutil.resolve_name(name)())


_KEPT = 8 << 20
_LIMIT_ALONE = 32 << 20
_PATIENCE = 5.0
_WINDOW = 8 << 20


class OutputRelay:
    """Runner output on its way to the client, with its call and local rank. `mark` separates calls in a pipe.

    passing ──more than a window unacknowledged──► holding: pipes are not read, so bodies block in print
       ▲                                              │ for longer than PATIENCE
       └────────half of a window is free─────────  thinning: output is dropped, and the amount is reported
    """

    home: ClientLink

    def __init__(self, slots: Mapping[str, Slot], mark: bytes, clock: Callable[[], float]) -> None:
        self._slots, self._mark, self._clock = slots, mark, clock
        self.window = _WINDOW
        """Bytes that may be unacknowledged."""
        self._under_way = 0
        self._held: float | None = None  # since when bodies wait
        self._thinning = False
        self._left_out = self._lines = 0  # bytes and lines that were not told
        self._why = ""

    def full(self) -> bool:
        """Called once per turn."""
        connected = self.home.connected
        behind = connected and (self._under_way > self.window or self.home.kept_bytes > _KEPT)
        if self._thinning and connected and self._under_way <= self.window // 2 and self.home.kept_bytes <= _KEPT // 2:
            self._thinning = False
        if not behind or self._thinning:
            self._held = None
            return False
        if self._held is None:
            self._held = self._clock()
        if self._clock() - self._held > _PATIENCE:
            self._thinning, self._held = True, None
        return not self._thinning

    def fence(self) -> None:
        self._under_way = self._left_out = self._lines = 0
        self._thinning, self._held = False, None

    @handles(ClientToAgent.Taken)
    def _taken(self, message: ClientToAgent.Taken) -> None:
        self._under_way = max(0, self._under_way - message.size)

    def written(self, runner: RunnerProcess, pipe: Pipe, data: bytes) -> None:
        slot = self._slots.get(runner.name)
        place = slot.place if slot is not None else 0
        if runner.threads > 1:
            self._tell(pipe.stream, None, place, data)
            return
        first = next(iter(slot.calls), None) if slot is not None else None
        for call, piece in pipe.take_apart(data, self._mark):
            # without a mark it is of the call that came when the runner had nothing else
            known = call if slot is not None and call in slot.calls else first
            self._tell(pipe.stream, known, place, piece)

    def said(self, runner: RunnerProcess, stream: Stream, call: str | None, buffers: Buffers) -> None:
        slot = self._slots.get(runner.name)
        for data in buffers:
            self._tell(stream, call, slot.place if slot is not None else 0, data)

    def say_left_out(self, stream: Stream = "stderr", call: str | None = None, place: int = 0) -> None:
        if self._left_out:
            lines, size, self._lines, self._left_out = self._lines, self._left_out, 0, 0
            note = f"\n... {lines:,} lines ({size:,} bytes) of output are omitted here: {self._why} ...\n".encode()
            self._pass_on(stream, call, place, note)

    def _tell(self, stream: Stream, call: str | None, place: int, data: Any) -> None:
        self._why = self._excess() or self._why
        if self._excess():
            self._left_out += len(data)
            self._lines += bytes(data).count(b"\n")
            return
        self.say_left_out(stream, call, place)
        self._pass_on(stream, call, place, data)

    def _excess(self) -> str:
        if not self.home.connected:
            return "the client was away" if self.home.kept_bytes > _LIMIT_ALONE else ""
        if self._thinning or self._under_way > 2 * self.window:
            return "they came faster than the client's listeners, or the network, could take them"
        return ""

    def _pass_on(self, stream: Stream, call: str | None, place: int, data: Any) -> None:
        self._under_way += output_cost(len(data))
        self.home.tell(AgentToClient.Out(stream, call, place, [data]))
