"""The fork server and the keeper on a machine that cannot start processes, and agents whose fork server is silent."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.node import keeper
from skyward.node.fork_server import _ForkServer
from skyward.node.orders import SCARCE, UNANSWERED, AgentToForkServer, written
from skyward.node.runners import Ended, Printed, Runners
from skyward.node.terms import Terms, TermsPage
from tests.support.waiting import until

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The agent's end of a socket, and the fork server's."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def no_more_processes() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def events(selector: selectors.BaseSelector) -> list[Any]:
    return [event for key, mask in selector.select(0) for event in key.data(mask)]


def test_a_failed_fork_is_the_end_of_one_runner_and_says_why(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair
    control, other = socket.socketpair()
    server = _ForkServer(control)
    monkeypatch.setattr(os, "fork", no_more_processes)
    with selectors.DefaultSelector() as selector, control, other, server._wake, server._wake_write:
        runners = Runners(selector, ours)
        runners.spawn("1-0", 1, {}, "/")
        open_before = len(os.listdir("/proc/self/fd"))
        server._obey(theirs)
        assert len(os.listdir("/proc/self/fd")) <= open_before, "what came with the order is closed"
        happened = events(selector)
        printed = b"".join(event.data for event in happened if isinstance(event, Printed))
        assert b"no process could be started: Resource temporarily unavailable" in printed
        (ended,) = [event for event in happened if isinstance(event, Ended)]
        assert ended.status == SCARCE
        runners.forget(ended.runner)


def test_a_failed_fork_for_an_agent_that_is_gone_costs_the_fork_server_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    control, other = socket.socketpair()
    server = _ForkServer(control)
    monkeypatch.setattr(os, "fork", no_more_processes)
    with control, other, server._wake, server._wake_write:
        read, write = os.pipe()
        socket.send_fds(ours, [written(AgentToForkServer.Spawn("1-0", "/"))], [write] * 5)
        ours.close()
        os.close(read)  # nobody reads what the runner prints
        os.close(write)
        server._obey(theirs)


def test_an_agent_counts_how_long_its_fork_server_is_silent(pair: Pair) -> None:
    ours, theirs = pair
    with selectors.DefaultSelector() as selector:
        runners = Runners(selector, ours)
        assert runners.unanswered() == 0
        runners.kill("1-0")
        assert [runners.unanswered() for _ in range(3)] == [1, 2, 3]
        theirs.recv(1 << 16)
        theirs.send(json.dumps(["killed", "1-0", 0]).encode())
        assert events(selector) == []
        assert runners.unanswered() == 0


def test_a_runner_that_is_gone_without_a_word_of_the_fork_server_is_asked_for(pair: Pair) -> None:
    ours, theirs = pair
    with selectors.DefaultSelector() as selector:
        runners = Runners(selector, ours)
        runners.spawn("1-0", 1, {}, "/")
        _, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 5)
        theirs.send(json.dumps(["forked", "1-0", 99, 0]).encode())
        for fd in fds:
            os.close(fd)  # as if the process had died
        until(lambda: events(selector) == [] and runners.unanswered() > 0)
        assert json.loads(theirs.recv(1 << 16))[:2] == ["kill", "1-0"]
        theirs.send(json.dumps(["ended", "1-0", -9, 0]).encode())
        (ended,) = events(selector)
        runners.forget(ended.runner)


@pytest.fixture
def idle_keeper(tmp_path: Path) -> Iterator[Callable[[Any], keeper._Keeper]]:
    made: list[keeper._Keeper] = []

    def make(fork_server: Any) -> keeper._Keeper:
        made.append(keeper._Keeper(str(tmp_path), 0.0, 30.0, None, fork_server, 0o22))
        return made[-1]

    yield make
    for each in made:
        each._wake.close()
        each._wake_write.close()


class FakeForkServer(keeper._ForkServerProcess):
    def __init__(self, pid: int = 0) -> None:
        self.pid, self.killed = pid, False

    def forget(self) -> None:
        pass


def test_a_keeper_that_cannot_start_a_fork_server_tries_again(
    idle_keeper: Callable[[Any], keeper._Keeper], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dead, alive = FakeForkServer(), FakeForkServer(7)
    tries = [BlockingIOError(errno.EAGAIN, "too many"), OSError(errno.ENOMEM, "no memory"), None]

    def start(umask: int) -> FakeForkServer:
        error = tries.pop(0)
        if error is not None:
            raise error
        return alive

    monkeypatch.setattr(keeper, "_ForkServerProcess", start)
    mine = idle_keeper(dead)
    mine._start_missing()
    assert mine._fork_server is dead
    mine._start_missing()
    assert len(tries) == 2, "there is a pause"
    for _ in range(2):
        mine._next_try = 0.0  # time passes
        mine._start_missing()
    assert mine._fork_server is alive
    assert 1.0 < mine._wait() <= 30.0
    assert "a process could not be started: [Errno 12] no memory" in capfd.readouterr().err


def test_a_keeper_starts_an_agent_once_when_its_fork_server_did_not_answer(
    idle_keeper: Callable[[Any], keeper._Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, ended = idle_keeper(FakeForkServer(7)), list[tuple[int, int]]()
    node = keeper._Node(0, mine._wake, 0, {}, pid=21)
    mine._nodes = [node]
    killed: list[int] = []
    started: list[int] = []

    def start(node: keeper._Node) -> None:
        node.pid = 22
        started.append(mine._fork_server.pid)

    monkeypatch.setattr(keeper, "_kill", killed.append)
    monkeypatch.setattr(keeper, "_ForkServerProcess", lambda umask: FakeForkServer(8))
    monkeypatch.setattr(keeper.processes, "ended_children", lambda: iter(ended))
    monkeypatch.setattr(mine, "_start_agent", start)
    ended[:] = [(21, UNANSWERED)]
    mine._reap()
    assert killed == [7]
    assert started == [], "it would end with the fork server"
    ended[:] = [(7, -9)]
    mine._reap()
    assert started == [8]
    assert (node.pid, node.restarts) == (22, 1)


def test_a_keeper_looks_in_time_whether_its_time_to_live_is_over_and_says_so(
    idle_keeper: Callable[[Any], keeper._Keeper], capfd: pytest.CaptureFixture[str]
) -> None:
    mine = idle_keeper(FakeForkServer())
    assert not mine._over()
    assert mine._wait() <= 30.0
    mine._born -= 30.0  # time passes
    assert mine._wait() == 0.0
    assert mine._over()
    assert json.loads(capfd.readouterr().out) == ["over", 0]


def test_a_keeper_hears_of_more_agents_than_fit_on_a_page(idle_keeper: Callable[[Any], keeper._Keeper]) -> None:
    mine = idle_keeper(FakeForkServer())
    mine._page = TermsPage(2000)
    mine._nodes = [keeper._Node(number, mine._wake, number, {}) for number in range(2000)]
    mine._page.slot(1999).hear(mine._born + 5.0)
    assert mine._terms.heard == mine._born + 5.0


def test_a_keeper_ends_when_an_agent_was_told_so_but_never_later_than_its_own_time_to_live(
    idle_keeper: Callable[[Any], keeper._Keeper],
) -> None:
    mine = idle_keeper(FakeForkServer())
    mine._page = TermsPage(2)
    mine._page.slot(1).take(Terms(deadline=mine._born + 1000.0, serial=1))
    assert mine._terms.deadline == mine._born + 30.0
    mine._page.slot(0).take(Terms(deadline=mine._born - 1.0, serial=2))
    assert mine._over()
