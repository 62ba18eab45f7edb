"""The shell of a pod does what a shell of a host does: over the real `kubectl exec`."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.api.provider import Machine
from skyward.api.spec import Spec
from skyward.errors import BootstrapError, HostUnreachable
from skyward.setup.pods import PodShell
from tests.support.kubernetes.cluster import Cluster


@pytest.fixture(scope="module")
def machine(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    from tests.kubernetes.conftest import USER

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))
        lease = sky.Kubernetes(template=USER).acquire(Spec(), "shell", 1, 120, print)
        yield lease.machines[0]
        lease.close(print)


@pytest.fixture
def shell(machine: Machine) -> Iterator[PodShell]:
    assert machine.pod is not None
    made = PodShell(machine.pod)
    made.connect(time.monotonic() + 60)
    yield made
    made.close()


@pytest.mark.parametrize(
    "word", ["a b", "'", '"', "\\", "$HOME", "`id`", "a\nb", "", "-x", "%s", "\\n", "é☃", "*", "trailing\n"]
)
def test_arguments_arrive_as_they_are(shell: PodShell, word: str) -> None:
    script = "import sys; sys.stdout.buffer.write(sys.argv[1].encode())"
    done = shell.run(["python3", "-c", script, word])
    assert (done.code, done.out, done.err) == (0, word.encode(), "")


def test_input_output_errors_and_codes_are_told_apart(shell: PodShell) -> None:
    data = os.urandom(3 << 20)
    done = shell.run(["sh", "-c", "cat; echo oops >&2; exit 7"], data)
    assert (done.code, done.out, done.err) == (7, data, "oops\n")


def test_a_long_command_is_no_part_of_an_address(shell: PodShell) -> None:
    done = shell.run(["sh", "-c", f"# {'x' * 100_000}\necho here"])
    assert done.out == b"here\n"


def test_a_program_that_takes_too_long_is_given_up(shell: PodShell) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        shell.run(["sleep", "60"], timeout=2)


def test_files_arrive_whole_and_private(shell: PodShell, tmp_path: Path) -> None:
    content = os.urandom(5 << 20)
    (tmp_path / "file").write_bytes(content)
    shell.upload(tmp_path / "file", "/tmp/one")
    shell.upload(content, "/tmp/two")
    said = shell.run(["sh", "-c", "cmp /tmp/one /tmp/two && stat -c %a /tmp/one /tmp/two"])
    assert said.out.split() == [b"600", b"600"]
    with pytest.raises(BootstrapError, match=r"not write there|does not exist"):
        shell.upload(b"x", "/proc/none/x")


def test_a_started_program_is_spoken_with_and_sees_the_end_of_its_input(shell: PodShell) -> None:
    with tempfile.TemporaryFile() as errors:
        process = shell.start(["sh", "-c", "read -r line; echo got $line; cat; echo end"], {}, errors)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a word\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got a word\n"
        process.stdin.close()
        assert process.stdout.readline() == b"end\n"
        assert process.wait(30) == 0
        process.stdout.close()


ECHO = """
import os, socket, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    for _ in range(3):
        connection, _ = server.accept()
        while piece := connection.recv(1 << 16):
            connection.sendall(piece)
        connection.close()
"""


def test_a_port_is_reached_both_ways_to_its_end(shell: PodShell) -> None:
    with tempfile.TemporaryFile() as errors:
        process = shell.start(["python3", "-c", ECHO], {}, errors)
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with shell.reach("127.0.0.1", port) as sock:
            data = os.urandom(200_000)
            sock.sendall(data)
            got = b""
            while len(got) < len(data):
                got += sock.recv(1 << 16)
            assert got == data
        process.stdin.close()
        assert process.wait(30) == 0
        process.stdout.close()
    with pytest.raises(ConnectionRefusedError):
        shell.reach("127.0.0.1", 1)


def test_a_pod_that_does_not_exist_is_final(machine: Machine) -> None:
    from dataclasses import replace

    assert machine.pod is not None
    shell = PodShell(replace(machine.pod, pod="skyward-none-0-abcde"))
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match="does not exist"):
        shell.connect(began + 120)
    assert time.monotonic() - began < 60


def test_closing_ends_what_was_started(machine: Machine) -> None:
    assert machine.pod is not None
    shell = PodShell(machine.pod)
    with tempfile.TemporaryFile() as errors:
        process = shell.start(["cat"], {}, errors)
        shell.close()
        assert process.wait(30) != 0
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
