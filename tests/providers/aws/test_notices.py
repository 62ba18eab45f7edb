"""Waiting for EC2's notice: against a metadata service that asks for tokens, goes away, and talks nonsense."""

from __future__ import annotations

import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyward import errors
from skyward.api.spec import Spec
from skyward.providers.aws import notices
from tests.support.cloud import Cloud, Instance, metadata
from tests.support.cloud.metadata import Metadata
from tests.support.waiting import until

ACTION = "/latest/meta-data/spot/instance-action"


def waiting(port: int) -> Future[float]:
    """`wait` in a thread, as the agent has it."""
    future: Future[float] = Future()

    def work() -> None:
        try:
            future.set_result(notices.wait(f"http://127.0.0.1:{port}", poll=0.02))
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=work, daemon=True).start()
    return future


@contextmanager
def serving(server: socketserver.TCPServer) -> Generator[int]:
    """Serves in a thread; the port."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """What the metadata service of a machine serves."""
    metadata.write(tmp_path / "metadata", "meta-data/instance-id", "i-1")
    metadata.write(tmp_path / "metadata", "meta-data/placement/availability-zone", "us-east-1a")
    return tmp_path / "metadata"


def asked(server: Metadata, status: int) -> int:
    return server.calls.count(("GET", ACTION, status))


def test_a_notice_is_seen_with_the_time_that_is_left(machine: Path) -> None:
    """Row 21, N14."""
    server = Metadata(machine, "127.0.0.1", 0)
    with serving(server) as port:
        future = waiting(port)
        until(lambda: asked(server, 404) > 2)
        assert not future.done()
        metadata.notice(machine, time.time() + 1000)
        assert 900 < future.result(60) <= 1000
    assert len(server.tokens) == 1
    assert asked(server, 401) == 0


def test_a_token_that_the_service_has_forgotten_is_replaced(machine: Path) -> None:
    server = Metadata(machine, "127.0.0.1", 0)
    with serving(server) as port:
        future = waiting(port)
        until(lambda: asked(server, 404))
        server.tokens.clear()
        until(lambda: server.tokens)
        metadata.notice(machine, time.time() + 1000)
        assert future.result(60) > 900
    assert asked(server, 401)


def test_a_token_is_renewed_before_it_expires(machine: Path) -> None:
    server = Metadata(machine, "127.0.0.1", 0, longest=1)
    server.valid = lambda token: token in server.tokens  # also when this computer is too busy to be in time
    with serving(server) as port:
        future = waiting(port)
        until(lambda: len(server.tokens) == 2)
        metadata.notice(machine, time.time() + 1000)
        assert future.result(60) > 900
    assert asked(server, 401) == 0


def test_the_metadata_service_is_one_that_cloud_init_can_read(machine: Path) -> None:
    """It asks for versions by their dates, and for the names of keys before it asks for a key."""
    metadata.write(machine, "meta-data/public-keys/0/openssh-key", "ssh-ed25519 AAAA")
    server = Metadata(machine, "127.0.0.1", 0)
    with serving(server) as port:

        def said(path: str, method: str = "GET", **headers: str) -> str:
            asking = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, headers=headers)
            with urllib.request.urlopen(asking, timeout=60) as answer:
                return answer.read().decode()

        token = said("/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        known = {"X-aws-ec2-metadata-token": token}
        assert "2021-03-23" in said("/", **known).splitlines()
        assert said("/2021-03-23/meta-data/instance-id", **known) == "i-1"
        assert said("/2021-03-23/meta-data/public-keys/", **known) == "0=key"
        assert said("/latest/meta-data/public-keys/0/openssh-key", **known) == "ssh-ed25519 AAAA"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            said("/1999-01-01/meta-data/instance-id", **known)


class Nonsense(socketserver.ThreadingTCPServer):
    """Answers the same to everyone, and counts them."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, answer: bytes, port: int = 0) -> None:
        self.answer, self.visits = answer, 0
        super().__init__(("127.0.0.1", port), self._Visit)

    class _Visit(socketserver.BaseRequestHandler):
        server: Any

        def handle(self) -> None:
            self.server.visits += 1
            self.request.recv(65536)
            self.request.sendall(self.server.answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"hello\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xff\xfe\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-aws-ec2-metadata-token-ttl-seconds: soon\r\nContent-Length: 2\r\n\r\nno",
    ],
)
def test_what_is_no_metadata_service_is_asked_again_until_there_is_one(machine: Path, answer: bytes) -> None:
    nonsense = Nonsense(answer)
    with serving(nonsense) as port:
        future = waiting(port)
        until(lambda: nonsense.visits > 1)
    metadata.notice(machine, time.time() + 1000)
    with serving(Metadata(machine, "127.0.0.1", port)):
        assert future.result(60) > 900


def test_a_service_that_goes_away_and_comes_back_is_found_again(machine: Path) -> None:
    server = Metadata(machine, "127.0.0.1", 0)
    with serving(server) as port:
        future = waiting(port)
        until(lambda: asked(server, 404))
    again = Metadata(machine, "127.0.0.1", port)
    with serving(again):
        until(lambda: asked(again, 404))
        assert not future.done()
        metadata.notice(machine, time.time() + 1000)
        assert future.result(60) > 900
    assert asked(again, 401), "the token was of the service as it was before"


@pytest.mark.parametrize(
    "text", ["", "<html>", "[]", "{}", '{"time": 5}', '{"action": "terminate", "time": "soon"}', "null", '"2026"']
)
def test_what_is_no_notice_is_not_taken_for_one(machine: Path, text: str) -> None:
    metadata.write(machine, "meta-data/spot/instance-action", text)
    server = Metadata(machine, "127.0.0.1", 0)
    with serving(server) as port:
        future = waiting(port)
        until(lambda: asked(server, 200) > 1)
        assert not future.done()
        metadata.notice(machine, time.time() + 1000, action="stop")
        assert future.result(60) > 900


def test_proxies_of_the_environment_are_not_used(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata.notice(machine, time.time() + 1000)
    proxy = Nonsense(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
    with serving(proxy) as way, serving(Metadata(machine, "127.0.0.1", 0)) as port:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{way}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert waiting(port).result(60) > 900
    assert proxy.visits == 0


def test_the_time_left_does_not_depend_on_the_clock_of_the_machine() -> None:
    at = notices.taken_at(b'{"action": "terminate", "time": "2026-03-01T12:02:00Z"}')
    date = "Sun, 01 Mar 2026 12:00:00 GMT"
    assert notices.remaining(at, date, at - 120) == 120
    assert notices.remaining(at, date, at - 119.5) == 119.5, "a clock that is right tells it better than whole seconds"
    assert notices.remaining(at, date, at - 5000) == 120
    assert notices.remaining(at, date, at + 5000) == 120
    assert notices.remaining(at, None, at - 30) == 30
    assert notices.remaining(at, "at noon", at - 30) == 30
    assert notices.remaining(at, "Sun, 01 Mar 2026 13:00:00 GMT", at) == 0


@pytest.mark.parametrize("time", ["2026-03-01T12:02:00Z", "2026-03-01T12:02:00.000+00:00", "2026-03-01T12:02:00"])
def test_times_are_those_of_utc(time: str) -> None:
    assert notices.taken_at(json.dumps({"action": "hibernate", "time": time}).encode()) == 1772366520


def test_waiting_loads_nothing_of_aws_and_nothing_heavy() -> None:
    """It shares a process with the agent, on machines that have no boto3."""
    heavy = "boto3 botocore moto werkzeug distributed dask rich numpy cryptography skyward.testing".split()
    source = f"import sys, skyward.providers.aws.notices; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout.strip() == "[]"


def test_the_service_answers_as_that_of_a_machine_does(machine: Path) -> None:
    def said(method: str, path: str, **headers: str) -> tuple[int, str]:
        from http.client import HTTPConnection

        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    ttl = {"X_aws_ec2_metadata_token_ttl_seconds": "60"}
    with serving(Metadata(machine, "127.0.0.1", 0)) as port:
        assert said("GET", "/latest/meta-data/instance-id")[0] == 401
        assert said("GET", "/latest/meta-data/instance-id", X_aws_ec2_metadata_token="guessed")[0] == 401
        assert said("PUT", "/latest/api/token")[0] == 400
        assert said("PUT", "/latest/api/token", X_aws_ec2_metadata_token_ttl_seconds="21601")[0] == 400
        assert said("PUT", "/latest/api/token", X_Forwarded_For="192.0.2.1", **ttl)[0] == 403
        status, text = said("PUT", "/latest/api/token", **ttl)
        assert status == 200
        token = {"X_aws_ec2_metadata_token": text}
        assert said("GET", "/latest/meta-data/instance-id", **token) == (200, "i-1")
        assert said("GET", "/latest/meta-data/placement/availability-zone", **token) == (200, "us-east-1a")
        assert said("GET", "/latest/meta-data/", **token) == (200, "instance-id\nplacement/")
        assert said("GET", ACTION, **token)[0] == 404
        assert said("GET", "/latest/../../etc/passwd", **token)[0] == 404
        metadata.notice(machine, 1772366520)
        assert said("GET", "/latest/meta-data/spot/termination-time", **token) == (200, "2026-03-01T12:02:00Z")
        wanted = {"action": "terminate", "time": "2026-03-01T12:02:00Z"}
        assert json.loads(said("GET", ACTION, **token)[1]) == wanted


def test_the_service_is_a_program_as_well(machine: Path) -> None:
    """On a machine there is only its file."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    argv = [sys.executable, "-I", "-S", metadata.__file__, str(machine), "--address", "127.0.0.1", "--port", str(port)]
    metadata.notice(machine, time.time() + 1000)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            assert waiting(port).result(60) > 900
        finally:
            program.kill()


class Told:
    """Hooks that keep what they are told."""

    def __init__(self) -> None:
        self.notices: list[tuple[str, float]] = []
        self.ended: list[str] = []

    def machine_started(self, instance: Instance) -> None: ...

    def machine_terminated(self, instance: Instance) -> None:
        self.ended.append(instance.id)

    def machine_noticed(self, instance: Instance, deadline: float) -> None:
        self.notices.append((instance.id, deadline))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def cloud(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    with Cloud(told) as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        yield cloud


def test_a_cloud_takes_a_machine_away_when_its_notice_is_up(cloud: Cloud, told: Told) -> None:
    """Row 21; what was ended before is not ended again, and what was announced goes with the cloud."""
    first, second, third = (m.id for m in cloud.aws().acquire(Spec(nodes=3, allocation="spot"), "p").machines)
    now = time.time()
    cloud.notice(first, seconds=0.2)
    cloud.notice(second, seconds=0.2)
    cloud.notice(third)
    assert [id for id, _ in told.notices] == [first, second, third]
    assert all(deadline >= now for _, deadline in told.notices)
    cloud.end(second, "Client.InstanceInitiatedShutdown")
    until(lambda: first in told.ended)
    assert cloud.machines.all[first].reason == "Server.SpotInstanceTermination"
    with pytest.raises(errors.InvalidArgument, match=r"ended already.*cloud\.running"):
        cloud.notice(first)
    assert [instance.id for instance in cloud.running()] == [third]
    cloud.forget()
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    assert sorted(told.ended) == sorted([first, second, third])
    assert cloud.machines.all == {}


def test_only_spot_machines_are_given_notice(cloud: Cloud, told: Told) -> None:
    (machine,) = cloud.aws().acquire(Spec(allocation="on-demand"), "p").machines
    with pytest.raises(errors.InvalidArgument, match="it is on-demand"):
        cloud.notice(machine.id)
    with pytest.raises(errors.InvalidArgument, match="never had"):
        cloud.notice("i-0")
    assert told.notices == []
