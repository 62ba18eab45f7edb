"""Where machines arrive: real connections to a real listener, by machines that behave well and by others."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import BootstrapError, InvalidArgument, SkywardError
from skyward.node import join
from skyward.node.join import Over, read_text
from skyward.providers.join import write_file
from skyward.setup.joined import arrivals as arrivals_file
from skyward.setup.joined import members, places
from skyward.setup.joined.arrivals import Arrivals, JoinedLease, JoinShell, join_file, join_program, open_arrivals
from tests.support.dask_scheduler import client_of_a_scheduler
from tests.support.waiting import until


@pytest.fixture
def arrivals(request: pytest.FixtureRequest) -> Iterator[Arrivals]:
    made = open_arrivals(f"arrivals-{id(request)}", ttl=3600, lease=60, host="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def interchangeable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrivals]:
    monkeypatch.setattr(places, "_ABSENT", 0.2)
    monkeypatch.setattr(arrivals_file, "_SETTLED", 0.2)
    name = f"interchangeable-{id(request)}"
    made = open_arrivals(name, ttl=3600, lease=60, host="127.0.0.1", interchangeable=True)
    yield made
    made.close()


def told(arrivals: Arrivals) -> dict[str, Any]:
    return json.loads(base64.urlsafe_b64decode(arrivals.text))


def dial(arrivals: Arrivals) -> ssl.SSLSocket:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls.wrap_socket(socket.create_connection(told(arrivals)["addresses"][0], 30))


def greet(arrivals: Arrivals, place: int | None, key: str, **changes: Any) -> tuple[ssl.SSLSocket, dict[str, Any]]:
    """What a machine says, and what it hears."""
    text = told(arrivals)
    proof = join.token(text["secret"], text["pool"], place)
    sock = dial(arrivals)
    hello = {"place": place, "token": proof, "key": key, "name": "machine", **changes}
    sock.sendall(json.dumps({"join": hello}).encode() + b"\n")
    answer = b""
    while piece := b"" if answer.endswith(b"\n") else sock.recv(4096):
        answer += piece
    return sock, json.loads(answer or b"{}")


def refused(arrivals: Arrivals, place: int, key: str) -> str:
    """Why a machine is not let in."""
    sock, answer = greet(arrivals, place, key)
    sock.close()
    return answer["refused"]


@pytest.fixture
def machine(arrivals: Arrivals, tmp_path: Path) -> Iterator[JoinShell]:
    """A machine that has joined: the real program."""
    path = tmp_path / "join.py"
    path.write_text(join_file(arrivals.text))
    path.chmod(0o600)
    process = subprocess.Popen([sys.executable, "-I", str(path)], stderr=subprocess.DEVNULL)
    (found,) = arrivals.wait([0], time.monotonic() + 60, lambda text: None)
    assert found.joined is not None
    yield found.joined.open_shell()
    arrivals.close()
    assert process.wait(30) == 0


def test_programs_get_their_input_and_their_output_and_end_come_back(machine: JoinShell, tmp_path: Path) -> None:
    done = machine.run(["sh", "-c", "cat; echo bad >&2; exit 3"], b"x" * 2_000_000)
    assert (done.code, len(done.out), done.err) == (3, 2_000_000, "bad\n")
    assert machine.run(["true"]).code == 0
    machine.upload(b"content", f"{tmp_path}/file")
    assert (tmp_path / "file").read_bytes() == b"content"
    (tmp_path / "large").write_bytes(bytes(range(256)) * 20_000)
    machine.upload(tmp_path / "large", f"{tmp_path}/copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "large").read_bytes()
    with pytest.raises(BootstrapError, match="the directory does not exist there"):
        machine.upload(b"x", f"{tmp_path}/no/such")
    with pytest.raises(BootstrapError, match="no-such-program"):
        machine.run(["no-such-program"])


def test_a_program_that_takes_too_long_is_ended(machine: JoinShell) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        machine.run(["sh", "-c", f"echo $$; exec sleep 1003.{os.getpid()}"], timeout=1.0)
    until(lambda: not _running(f"sleep 1003.{os.getpid()}"), 20)


def test_a_started_program_has_pipes_and_outlives_the_connection_to_it(machine: JoinShell, tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as errors:
        process = machine.start(
            ["sh", "-c", f"read line; echo got $line; cat; echo over > {tmp_path}/over"], {}, errors
        )
        process.stdin.write(b"this\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got this\n"
        assert process.poll() is None
        process.kill()
        assert process.wait(10) == 255
        process.stdin.close()
        process.stdout.close()
    until((tmp_path / "over").exists, 20)  # its standard input has ended


def test_connections_go_to_ports_of_the_machine(machine: JoinShell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server, b"hello"), daemon=True).start()
        with machine.reach("127.0.0.1", server.getsockname()[1]) as sock:
            assert sock.recv(100) == b"hello"
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        machine.reach("127.0.0.1", port)


def test_dask_is_reached_through_the_machine_and_no_port_of_ours(machine: JoinShell, tmp_path: Path) -> None:
    """SEC-25."""
    with client_of_a_scheduler(tmp_path, machine.reach) as client:
        assert client.run_on_scheduler(os.getpid) != os.getpid()


def test_no_program_of_a_machine_sees_the_secret(arrivals: Arrivals, tmp_path: Path) -> None:
    """SEC-10, SEC-34."""
    env = {"PATH": "/usr/bin:/bin", "SKYWARD_JOIN": arrivals.text, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=tmp_path
    )
    assert process.stdin is not None
    process.stdin.write(join_program().encode())
    process.stdin.close()
    (found,) = arrivals.wait([0], time.monotonic() + 60, lambda text: None)
    assert found.joined is not None
    seen = found.joined.open_shell().run(["env"]).out
    assert arrivals.text.encode() not in seen
    assert b"OMP_NUM_THREADS" not in seen
    assert arrivals.text.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    arrivals.close()
    assert process.wait(30) == 0


def test_a_second_machine_for_a_place_is_refused_and_the_user_is_told(arrivals: Arrivals) -> None:
    """SEC-34."""
    warned: list[str] = []
    arrivals.expect([0])
    with ExitStack() as open_ends:
        first, answer = greet(arrivals, 0, "key")
        open_ends.enter_context(first)
        assert answer["welcome"]["place"] == 0
        second, answer = greet(arrivals, 0, "another key", name="intruder")
        open_ends.enter_context(second)
        assert "taken by another machine" in answer["refused"]
        arrivals.warn_with(warned.append)
        again, answer = greet(arrivals, 0, "key")
        open_ends.enter_context(again)
        assert answer["welcome"]["place"] == 0
        stranger, answer = greet(arrivals, 1, "key", token="0" * 64)
        open_ends.enter_context(stranger)
        assert "secret" in answer["refused"]
    assert len(warned) == 1
    assert "intruder" in warned[0]


def test_a_machine_that_finds_every_place_taken_says_that_it_waits(arrivals: Arrivals, tmp_path: Path) -> None:
    arrivals.expect([0])
    first, _ = greet(arrivals, None, "key")
    path = tmp_path / "join.py"
    path.write_text(join_file(arrivals.text))
    path.chmod(0o600)
    with subprocess.Popen([sys.executable, "-I", str(path)], stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert "every place is taken" in waiting.stderr.readline()
        arrivals.expect([1])
        assert "as place 1" in waiting.stderr.readline()
        until(lambda: arrivals.member(1).connected)
        arrivals.close()
        assert waiting.wait(60) == 0
    first.close()


def test_machines_that_joined_are_replaced_unless_the_user_does_not_want_it(arrivals: Arrivals) -> None:
    arrivals.expect([0])
    first, _ = greet(arrivals, None, "key")
    (machine,) = arrivals.wait([0], time.monotonic() + 60, lambda text: None)
    assert machine.preemptible
    first.close()


def test_places_that_nobody_took_in_time_cannot_be_taken_later(arrivals: Arrivals) -> None:
    """SEC-34."""
    with pytest.raises(BootstrapError, match="1 of 1 machines did not join in time"):
        arrivals.wait([0], time.monotonic() + 0.1, lambda text: None)
    sock, answer = greet(arrivals, 0, "key")
    sock.close()
    assert "time to take it is over" in answer["refused"]


def test_machines_that_do_not_come_are_told_with_the_addresses_and_what_to_do() -> None:
    made = open_arrivals("unreached", ttl=3600, lease=60, advertise=["10.1.2.3", "192.0.2.7"], hint="Use login=.")
    try:
        with pytest.raises(BootstrapError, match=r"port \d+ of 10\.1\.2\.3, 192\.0\.2\.7; .* Use login=\.$"):
            made.wait([0], time.monotonic(), lambda text: None)
    finally:
        made.close()


def test_waiting_ends_when_the_engine_says_that_nobody_will_come(arrivals: Arrivals) -> None:
    with pytest.raises(BootstrapError, match="the job was cancelled"):
        arrivals.wait([0], time.monotonic() + 60, lambda text: None, failed=lambda: "the job was cancelled")


def test_enough_machines_are_enough_when_no_more_come(arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.setup.joined.arrivals._SETTLED", 0.2)
    arrivals.expect([0, 1, 2])
    ends = [greet(arrivals, place, f"key {place}")[0] for place in (0, 2)]
    found = arrivals.wait([0, 1, 2], time.monotonic() + 60, lambda text: None, least=2)
    assert [machine.joined.place for machine in found if machine.joined is not None] == [0, 2]
    for end in ends:
        end.close()


def test_a_machine_talks_to_nobody_but_the_pool_that_was_meant(arrivals: Arrivals, tmp_path: Path) -> None:
    """SEC-34."""
    other = open_arrivals(f"{arrivals.pool}-other", ttl=60, lease=60, host="127.0.0.1")
    try:
        text = {**told(arrivals), "addresses": told(other)["addresses"], "patience": 1}
        heard: list[dict[str, Any]] = []
        other._listener._joins = lambda sock, hello: heard.append(hello)  # pyright: ignore[reportPrivateUsage]
        path = tmp_path / "join.py"
        path.write_text(join_file(base64.urlsafe_b64encode(json.dumps(text).encode()).decode()))
        path.chmod(0o600)
        assert "_FIRST, _SILENT = 5.0, 60.0, 20.0" in path.read_text()
        path.write_text(path.read_text().replace("= 5.0, 60.0, 20.0", "= 5.0, 1.0, 20.0"))
        done = subprocess.run(
            [sys.executable, "-I", str(path)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1
        assert "its certificate differs" in done.stderr
        assert heard == []
    finally:
        other.close()


def test_a_file_that_others_can_read_is_refused(arrivals: Arrivals, tmp_path: Path) -> None:
    """SEC-21, SEC-34."""
    path = tmp_path / "join.py"
    path.write_text(join_file(arrivals.text))
    path.chmod(0o644)
    done = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"chmod 600 {path}" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(arrivals: Arrivals, tmp_path: Path) -> None:
    """SEC-21, SEC-34: it would lead this machine to a pool of theirs."""
    path = tmp_path / "join.txt"
    path.write_text(arrivals.text)
    path.chmod(0o600)
    os.chown(path, 65533, 65533)
    with pytest.raises(Over, match="belongs to another user"):
        read_text(str(path), False, "")
    os.chown(path, 0, 0)
    assert read_text(str(path), False, "")


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open", "sticky"])
def test_the_file_is_not_written_where_others_could_put_another_in_its_place(
    arrivals: Arrivals, tmp_path: Path, mode: int
) -> None:
    """SEC-21, SEC-34: `python3 join.py` in a shared directory ran another user's program; that attack worked."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    with pytest.raises(InvalidArgument, match=r'others can write into .*file="~/join.py"'):
        write_file(arrivals.text, tmp_path / "shared" / "join.py")
    assert not [*(tmp_path / "shared").iterdir()]
    path = tmp_path / "own" / "join.py"
    write_file(arrivals.text, path)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]


def test_the_listener_answers_neither_plain_text_nor_old_tls_nor_nonsense(arrivals: Arrivals) -> None:
    """SEC-3, SEC-34."""
    address = told(arrivals)["addresses"][0]
    for said in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40, b"0" * 32, b"\x16\x03\x01\x00\x05hello" * 20):
        with socket.create_connection(address, 30) as sock:
            sock.sendall(said)
            sock.settimeout(30)
            try:
                while sock.recv(4096) not in (b"",):
                    pass
            except ConnectionError:
                pass
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode, tls.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError), socket.create_connection(address, 30) as sock:
        tls.wrap_socket(sock)
    for said in (b"[]\n", b"{}\n", b'{"join": 1}\n', b'{"join": {}}\n', b"x" * 5000, b"[" * 4000 + b"\n"):
        with dial(arrivals) as sock:
            sock.sendall(said)
            try:
                assert sock.recv(100) == b""
            except OSError:
                pass


def test_a_crowd_that_says_nothing_shuts_no_machine_out(arrivals: Arrivals) -> None:
    """SEC-3, SEC-34."""
    address = told(arrivals)["addresses"][0]
    arrivals.expect([0])
    with ExitStack() as crowd:
        for _ in range(600):
            crowd.enter_context(socket.create_connection(address, 30))
        waiting = arrivals._listener._waiting  # pyright: ignore[reportPrivateUsage]
        until(lambda: len(waiting) <= members._PER_NETWORK, 30)  # pyright: ignore[reportPrivateUsage]
        sock, answer = greet(arrivals, 0, "key")
        sock.close()
        assert answer["welcome"]["place"] == 0


def test_a_hundred_machines_join_at_once_in_a_few_seconds(arrivals: Arrivals) -> None:
    """Light machines that speak the protocol: the time is that of the listener, on a busy computer."""
    arrivals.expect(range(100))
    began = time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        ends = list(threads.map(lambda place: greet(arrivals, place, f"key {place}"), range(100)))
        found = arrivals.wait(range(100), time.monotonic() + 60, lambda text: None)
    took = time.monotonic() - began
    for sock, answer in ends:
        assert "welcome" in answer
        sock.close()
    assert len({machine.id for machine in found}) == 100
    assert took < 30, took


def test_the_fingerprint_is_that_of_the_certificate(arrivals: Arrivals) -> None:
    """SEC-34."""
    with dial(arrivals) as sock:
        assert hashlib.sha256(sock.getpeercert(True) or b"").hexdigest() == told(arrivals)["fingerprint"]
        assert sock.version() == "TLSv1.3"


def test_the_program_runs_with_old_pythons_and_the_standard_library_only() -> None:
    import ast

    tree = ast.parse(join_program(), feature_version=(3, 8))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "skyward" in str(node.module)]


def _answer(server: socket.socket, text: bytes) -> None:
    with server.accept()[0] as sock:
        sock.sendall(text)


def _running(command: str) -> bool:
    return subprocess.run(["pgrep", "-f", f"^{command}$"], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_machine_that_was_lost_is_given_up_for_one_that_was_started_in_its_place(interchangeable: Arrivals) -> None:
    """SEC-34."""
    arrivals = interchangeable
    arrivals.expect([0])
    first, _ = greet(arrivals, 0, "first")
    machines = arrivals.wait([0], time.monotonic() + 60, lambda text: None)
    assert refused(arrivals, 0, "second") == "place 0 is taken by another machine", "it is there"
    lease = JoinedLease(sky.Join(), arrivals)
    assert lease.refresh(machines)[0].gone == ""
    first.close()
    until(lambda: "being given up" in refused(arrivals, 0, "second"), 30)
    assert "it was not there any more" in lease.refresh(machines)[0].gone
    assert any("in place of machine 0, which is given up" in text for text in arrivals.warnings)
    assert refused(arrivals, 0, "first") == "place 0 was given up"
    (place,) = arrivals.vacant(1)
    arrivals.expect([place])
    second, answer = greet(arrivals, 0, "second")
    assert answer["welcome"]["place"] == place == 1
    second.close()


def test_places_that_nobody_took_in_time_are_for_those_that_come_late(interchangeable: Arrivals) -> None:
    arrivals = interchangeable
    arrivals.expect([0, 1])
    first, _ = greet(arrivals, 0, "first")
    assert len(arrivals.wait([0, 1], time.monotonic() + 60, lambda text: None, least=1)) == 1
    second, answer = greet(arrivals, 5, "second")  # nobody waits for it at this moment
    assert answer["welcome"]["place"] == 1
    (place,) = arrivals.vacant(1)
    (machine,) = arrivals.wait([place], time.monotonic() + 60, lambda text: None)
    assert machine.joined is not None
    assert machine.joined.place == 1
    assert arrivals.vacant(1) == [2]
    first.close()
    second.close()


def _is_gone(arrivals: Arrivals, place: int) -> bool:
    """Whether a machine has left; whoever waits may have given its place up already."""
    try:
        return bool(arrivals.member(place).gone)
    except SkywardError:
        return True


def test_a_machine_that_leaves_before_the_others_have_come_is_not_counted(interchangeable: Arrivals) -> None:
    arrivals = interchangeable
    arrivals.expect([0, 1])
    first, _ = greet(arrivals, 0, "first")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(arrivals.wait, [0, 1], time.monotonic() + 60, lambda text: None)
        first.sendall(b'["leaving", "it was interrupted", 0]\n')
        until(lambda: _is_gone(arrivals, 0), 30)
        first.close()
        second, _ = greet(arrivals, 1, "second")
        third, answer = greet(arrivals, 0, "third")
        assert answer["welcome"]["place"] == 0
        assert len(waiting.result(60)) == 2
    second.close()
    third.close()
