"""Machines over ssh, tried with the real ssh program and real sshd processes on this computer."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import skyward
from skyward.api.shell import SshTarget
from skyward.errors import AuthenticationFailed, BootstrapError, HostKeyMismatch, HostUnreachable, InvalidArgument
from skyward.setup.local_shell import RECEIVE
from skyward.setup.ssh import shell as shell_file
from skyward.setup.ssh.connection import options, remote_line
from skyward.setup.ssh.shell import SshShell
from tests.support.dask_scheduler import client_of_a_scheduler
from tests.support.hosts import Network, unavailable
from tests.support.processes import gone
from tests.support.waiting import until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
CANARY = "canary-5d1c0a"

needs_sshd = pytest.mark.skipif(SSHD is None, reason="no sshd on this computer")
needs_hosts = pytest.mark.skipif(unavailable() is not None, reason=f"no test hosts: {unavailable()}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Sshd:
    """A host: an sshd of its own on a loopback port, with its own host key, which lets the key `id` in."""

    def __init__(self, directory: Path, extra: str = "", port: int = 0) -> None:
        self.directory, self.extra = directory, extra
        directory.mkdir(mode=0o700)
        for name in ("host", "id"):
            keygen(directory / name)
        self.port = port or free_port()
        self.know(directory / "host.pub")
        (directory / "config").write_text(
            textwrap.dedent(f"""\
                Port {self.port}
                ListenAddress 127.0.0.1
                HostKey {directory}/host
                AuthorizedKeysFile {directory}/id.pub
                StrictModes no
                UsePAM no
                PidFile none
                PasswordAuthentication no
                KbdInteractiveAuthentication no
                {extra}
            """)
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Sshd:
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        assert SSHD is not None
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.directory / "config")], stdin=subprocess.DEVNULL, stderr=log
            )
        until(lambda: answers(self.port))
        return self

    def stop(self) -> None:
        """Kills it and every login."""
        if self._process is None:
            return
        parent = psutil.Process(self._process.pid)
        logins = parent.children(recursive=True)
        for process in [parent, *logins]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process = None

    def logins(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children()

    def know(self, public: Path) -> None:
        kind, key = public.read_text().split()[:2]
        (self.directory / "known").write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def target(self, **changes: Any) -> SshTarget:
        given: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "key": str(self.directory / "id"),
            "known_hosts": str(self.directory / "known"),
            "config": False,
        }
        return SshTarget(**(given | changes))


def keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        return sock.recv(4) == b"SSH-"
    return False


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def masters(directory: Path) -> list[psutil.Process]:
    """The ssh processes whose sockets are in `directory`."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "-M" in line and str(directory) in " ".join(line) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for temporary files, in which nothing may be left, nor any process that has to do with it."""
    tmp_path_factory.getbasetemp()  # made where it belongs, before the place changes
    directory = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    left = [p.name for p in directory.iterdir()]
    shutil.rmtree(directory)
    assert left == [], "a control directory was left behind"
    until(lambda: not [p for p in psutil.process_iter() if str(directory) in " ".join(_cmdline(p))])


def _cmdline(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    with contextlib.ExitStack() as stack:

        def made(extra: str = "", started: bool = True) -> Sshd:
            sshd = Sshd(tmp_path / f"sshd{len(list(tmp_path.glob('sshd*')))}", extra)
            stack.callback(sshd.stop)
            return sshd.start() if started else sshd

        yield made


@pytest.fixture
def sshd(make: Callable[..., Sshd]) -> Sshd:
    return make()


@pytest.fixture
def opened() -> Iterator[Callable[[SshTarget], SshShell]]:
    with contextlib.ExitStack() as stack:

        def connected(target: SshTarget) -> SshShell:
            shell = SshShell(target)
            stack.callback(shell.close)
            shell.connect(soon())
            return shell

        yield connected


@pytest.fixture
def shell(sshd: Sshd, opened: Callable[[SshTarget], SshShell]) -> SshShell:
    return opened(sshd.target())


@pytest.fixture
def echo() -> Iterator[int]:
    """A port on which everything comes back."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=back, args=server.accept()[:1], daemon=True).start()

    def back(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def ask(sock: socket.socket, text: bytes) -> bytes:
    with sock:
        sock.sendall(text)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


SHELLS = [name for name in ("sh", "bash", "dash", "zsh", "fish") if shutil.which(name)]
NASTY = [
    "",
    " ",
    "'",
    "\\",
    "\\'",
    "'\\",
    "\\\\",
    "a\\",
    "$(touch x)",
    "`id`",
    ";",
    "&",
    "|",
    "~",
    "*",
    "=ls",
    "%1",
    "!!",
]
NASTY += ["a\nb", "\t", '"', "#", "{a,b}", "[x]", "<", ">", "é ü 漢", "\x7f\x01", "-n", "--", "$HOME", "x" * 65536]


def through(shell: str, words: list[str]) -> list[str]:
    line = remote_line(["printf", "%s\\0", *words])
    done = subprocess.run([shell, "-c", line], capture_output=True, check=True, timeout=180)
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", SHELLS)
def test_every_shell_reads_the_words_as_they_are(name: str) -> None:
    """SEC-16."""
    assert through(name, NASTY) == NASTY


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20), min_size=1)
)
def test_any_words_are_read_as_they_are(words: list[str]) -> None:
    """SEC-16."""
    for name in SHELLS:
        assert through(name, words) == words


def test_a_zero_byte_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="zero byte"):
        remote_line(["a\0b"])


@pytest.mark.parametrize("target", [SshTarget("-oProxyCommand=touch x"), SshTarget("a", user="-oProxyCommand=x")])
def test_a_host_or_user_is_never_an_option(target: SshTarget) -> None:
    with pytest.raises(InvalidArgument, match="option of ssh"):
        SshShell(target)


def test_host_keys_are_always_checked() -> None:
    """SEC-5: nothing in the source turns it off."""
    assert "StrictHostKeyChecking=yes" in options(SshTarget("a"), 10)
    assert "StrictHostKeyChecking=accept-new" in options(SshTarget("a", host_keys="accept-new"), 10)
    for file in Path(skyward.__file__).parent.rglob("*.py"):
        assert "StrictHostKeyChecking=no" not in file.read_text()


@needs_sshd
def test_a_program_gets_its_words_and_input_and_its_end_is_told(shell: SshShell) -> None:
    done = shell.run(["sh", "-c", 'cat; echo "$1" >&2; exit 7', "sh", "two  words '$HOME'"], b"input\0\xff")
    assert (done.code, done.out, done.err) == (7, b"input\0\xff", "two  words '$HOME'\n")
    assert shell.run(["true"]).code == 0
    assert shell.run(["sh", "-c", "exit 255"]).code == 255


@needs_sshd
def test_a_program_that_takes_too_long_is_told_by_its_own_words(shell: SshShell) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        shell.run(["sleep", "60"], timeout=0.5)
    assert caught.value.cmd == ["sleep", "60"]


@needs_sshd
@pytest.mark.parametrize("name", SHELLS)
def test_the_login_shell_may_be_any_of_the_usual(name: str, make: Any, opened: Any) -> None:
    sshd = make(f'ForceCommand exec {name} -c "$SSH_ORIGINAL_COMMAND"')
    shell = opened(sshd.target())
    assert shell.run(["printf", "%s|", "a'b\\", "$HOME", "\\\\"]).out == b"a'b\\|$HOME|\\\\|"


@needs_sshd
def test_what_start_up_files_print_is_not_taken_for_output(make: Any, opened: Any) -> None:
    sshd = make('ForceCommand echo Welcome; echo to gpu1; exec sh -c "$SSH_ORIGINAL_COMMAND"')
    shell = opened(sshd.target())
    assert shell.run(["echo", "yes"]).out == b"yes\n"
    with tempfile.TemporaryFile() as errors:
        process = shell.start(["cat"], {}, errors)
        out, _ = process.communicate(b"and back")
        assert out == b"and back"


@needs_sshd
def test_a_started_program_has_pipes_and_is_out_of_reach_of_the_terminal(shell: SshShell) -> None:
    with tempfile.TemporaryFile() as errors:
        process = shell.start(["sh", "-c", "read line; echo got $line; cat"], {}, errors)
        assert process.stdin is not None
        assert process.stdout is not None
        assert os.getsid(process.pid) != os.getsid(0)
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got one\n"
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdout.close()


@needs_sshd
def test_ctrl_c_in_the_terminal_does_not_reach_the_connection(shell: SshShell, place: Path) -> None:
    """Row 32."""
    (master,) = masters(place)
    assert os.getsid(master.pid) != os.getsid(0)


@needs_sshd
def test_variables_reach_neither_a_command_line_nor_the_host(shell: SshShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-10, SEC-13."""
    monkeypatch.setenv("LC_SKYWARD_TEST", CANARY)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    seen: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.extend(line for p in psutil.process_iter() if CANARY in (line := " ".join(_cmdline(p))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryFile() as errors:
        process = shell.start(["sh", "-c", "env; exec cat"], {"TOKEN": CANARY}, errors)
        out, _ = process.communicate()
    out += shell.run(["env"]).out
    over.set()
    watcher.join()
    assert CANARY.encode() not in out
    assert seen == []


@needs_sshd
def test_a_lost_connection_is_told_from_a_program_that_failed(shell: SshShell, place: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        seconds = f"60.{os.getpid()}"  # tells it from those of other runs of this test
        running = threads.submit(shell.run, ["sleep", seconds])
        until(lambda: [p for p in psutil.process_iter() if f"exec sleep {seconds}" in " ".join(_cmdline(p))])
        masters(place)[0].kill()
        with pytest.raises(HostUnreachable, match="lost while sleep ran"):
            running.result()


@needs_sshd
def test_a_host_that_allows_one_session_only_is_named(make: Any, opened: Any) -> None:
    shell = opened(make("MaxSessions 1").target())
    with pytest.raises(BootstrapError, match="MaxSessions"):
        shell.run(["true"])


@needs_sshd
def test_files_arrive_whole_and_private(shell: SshShell, tmp_path: Path) -> None:
    """SEC-21."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3_000_000))
    shell.upload(source, f"{tmp_path}/it's a $file")
    shell.upload(b"", f"{tmp_path}/empty")
    shell.upload(b"again", f"{tmp_path}/empty")
    assert (tmp_path / "it's a $file").read_bytes() == source.read_bytes()
    assert (tmp_path / "empty").read_bytes() == b"again"
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.part"))


@needs_sshd
def test_half_a_file_is_never_seen(shell: SshShell, tmp_path: Path, place: Path) -> None:
    """Row 53: the connection breaks in the middle."""
    os.mkfifo(tmp_path / "slow")
    with ThreadPoolExecutor(1) as threads:
        writer = threads.submit(os.open, tmp_path / "slow", os.O_WRONLY)
        # a pipe has no size: what is announced is more than what comes before the break
        shell_run = threading.Thread(target=_upload_until_cut, args=(shell, tmp_path))
        shell_run.start()
        fd = writer.result()
        os.write(fd, b"x" * 1000)
        until(lambda: any(p.stat().st_size == 1000 for p in tmp_path.glob("dest*.part")))
        masters(place)[0].kill()
        until(lambda: not list(tmp_path.glob("dest*.part")))
        os.close(fd)
        shell_run.join()
    assert not (tmp_path / "dest").exists()


def _upload_until_cut(shell: SshShell, tmp_path: Path) -> None:
    argv = ["sh", "-c", RECEIVE, "sh", f"{tmp_path}/dest", f"{tmp_path}/dest.1.part", "2000"]
    with (tmp_path / "slow").open("rb") as file, contextlib.suppress(HostUnreachable):
        shell._run(argv, file, None)  # pyright: ignore[reportPrivateUsage]


@needs_sshd
def test_a_missing_directory_is_said_in_words(shell: SshShell, tmp_path: Path) -> None:
    with pytest.raises(BootstrapError, match="the directory does not exist there"):
        shell.upload(b"x", f"{tmp_path}/no/such")


@needs_sshd
@needs_root
def test_a_full_disk_is_said_in_words(shell: SshShell, tmp_path: Path) -> None:
    """Row 26."""
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path / "small")], check=True)
    try:
        with pytest.raises(BootstrapError, match="the disk there is full"):
            shell.upload(b"x" * 1_000_000, f"{tmp_path}/small/file")
        assert list((tmp_path / "small").iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


@needs_sshd
def test_ports_of_the_host_are_reached(shell: SshShell, echo: int) -> None:
    data = os.urandom(2_000_000)
    assert ask(shell.reach("127.0.0.1", echo), b"hello") == b"hello"
    with ThreadPoolExecutor(16) as threads:
        for answer in threads.map(lambda _: ask(shell.reach("localhost", echo), b"x" * 1000), range(64)):
            assert answer == b"x" * 1000
    sock = shell.reach("127.0.0.1", echo)
    sender = threading.Thread(target=sock.sendall, args=(data,))
    sender.start()
    got = b""
    while len(got) < len(data):
        got += sock.recv(1 << 16)
    sender.join()
    sock.close()
    assert got == data


@needs_sshd
def test_a_port_that_nobody_listens_on_shows_as_an_end_of_file(shell: SshShell) -> None:
    with shell.reach("127.0.0.1", free_port()) as sock:
        assert sock.recv(1) == b""
    until(lambda: "Connection refused" in shell.said())


@needs_sshd
def test_dask_is_reached_through_the_connection_and_no_port_of_ours(
    shell: SshShell, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SEC-25: also by a connection that was made again; dask says nothing of options that only TCP has."""
    with client_of_a_scheduler(tmp_path, shell.reach) as client:
        pid = client.run_on_scheduler(os.getpid)

        def answers_again() -> bool:
            with contextlib.suppress(OSError):  # what goes over the lost connection
                return client.status == "running" and client.run_on_scheduler(os.getpid) == pid
            return False

        (old,) = masters(place)
        old.kill()
        until(lambda: gone(old.pid))
        until(answers_again)
    assert "Could not set timeout" not in capfd.readouterr().err


@needs_sshd
def test_a_lost_connection_is_made_again_once_for_all_who_ask(
    shell: SshShell, sshd: Sshd, echo: int, place: Path
) -> None:
    """Rows 28, 29."""
    assert ask(shell.reach("127.0.0.1", echo), b"one") == b"one"
    (old,) = masters(place)
    for _ in range(3):
        old.kill()
        until(lambda old=old: gone(old.pid))
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda n: ask(shell.reach("127.0.0.1", echo), b"%d" % n), range(32)))
        assert answers == [b"%d" % n for n in range(32)]
        (new,) = masters(place)
        assert new.pid != old.pid
        old = new
    until(lambda: len(sshd.logins()) == 1)


@needs_sshd
def test_a_host_that_went_away_is_refused_at_once_and_found_again_when_it_is_back(
    shell: SshShell, sshd: Sshd, echo: int, place: Path
) -> None:
    assert ask(shell.reach("127.0.0.1", echo), b"one") == b"one"
    sshd.stop()
    until(lambda: not masters(place))
    with pytest.raises(ConnectionRefusedError, match="nothing listens on port"):
        shell.reach("127.0.0.1", echo)
    sshd.start()
    assert ask(shell.reach("127.0.0.1", echo), b"two") == b"two"


@needs_hosts
def test_a_link_that_falls_silent_is_noticed_and_one_that_comes_back_is_used() -> None:
    """Rows 28 to 30, N9: a short silence does no harm; after a long one the connection is made anew."""
    with Network(1) as net, tempfile.TemporaryFile() as errors:
        host = net[0]
        target = SshTarget(host.address, "sky", key=str(net.key), known_hosts=str(net.known_hosts), config=False)
        shell = SshShell(target)
        shell.connect(soon())
        process = shell.start(["sh", "-c", "echo up; exec cat"], {}, errors)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        host.cut()
        process.stdin.write(b"written in silence\n")
        process.stdin.flush()
        time.sleep(1)  # how long the silence is, not a wait for luck
        host.heal()
        assert process.stdout.readline() == b"written in silence\n"
        host.cut()
        assert process.wait(60) == 255
        assert "not responding" in shell.said()
        host.heal()
        with shell.reach("127.0.0.1", 22) as sock:
            assert sock.recv(4) == b"SSH-"
        process.communicate()
        shell.close()


@needs_sshd
@needs_root
def test_another_user_of_this_computer_can_use_neither_the_connection_nor_what_leads_through_it(
    shell: SshShell, echo: int, place: Path
) -> None:
    """SEC-25: the same attempts work for ourselves."""
    shell.reach("127.0.0.1", echo).close()
    os.chmod(place, 0o755)
    sockets = [str(path) for path in place.glob("sky-*/*") if path.is_socket()]
    assert len(sockets) == 2
    attempt = "import socket, sys; [socket.socket(socket.AF_UNIX).connect(path) for path in sys.argv[1:]]"
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for path in sockets:
        denied = subprocess.run([*nobody, python, "-c", attempt, path], capture_output=True, text=True, cwd="/")
        assert "PermissionError" in denied.stderr
    assert subprocess.run([python, "-c", attempt, *sockets]).returncode == 0
    assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in sockets)


def failure(target: SshTarget, seconds: float = 10.0) -> BootstrapError:
    shell = SshShell(target)
    with pytest.raises(BootstrapError) as caught:
        shell.connect(soon(seconds))
    shell.close()
    return caught.value


@needs_sshd
def test_an_unknown_name_is_said_in_words(sshd: Sshd) -> None:
    error = failure(sshd.target(host="no-such-host.invalid"))
    assert type(error) is HostUnreachable
    assert "no-such-host.invalid" in str(error)


@pytest.fixture
def short_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is final after one second, and not after ten."""
    causes = [replace(cause, lasting=min(cause.lasting, 1.0)) for cause in shell_file._CAUSES]
    monkeypatch.setattr(shell_file, "_CAUSES", causes)


@needs_sshd
@pytest.mark.usefixtures("short_refusal")
def test_a_port_that_keeps_refusing_is_named_within_seconds_and_told_meanwhile(make: Any) -> None:
    sshd = make(started=False)
    shell, said = SshShell(sshd.target()), list[str]()
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match=f"nothing listens on port {sshd.port} of 127.0.0.1: the connection was"):
        shell.connect(soon(600), report=said.append)
    shell.close()
    assert time.monotonic() - began < 60  # of 600
    assert said == [f"connect to host 127.0.0.1 port {sshd.port}: Connection refused"]


@needs_sshd
@pytest.mark.usefixtures("short_refusal")
def test_a_new_machine_that_refuses_is_tried_until_the_deadline(make: Any) -> None:
    sshd = make(started=False)
    shell = SshShell(sshd.target())
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match="Tried"):
        shell.connect(soon(5), booting=True)
    shell.close()
    assert time.monotonic() - began > 2.5


@needs_sshd
def test_a_port_that_refuses_is_tried_more_than_once(make: Any) -> None:
    sshd = make(started=False)
    error = failure(sshd.target(), 4)
    assert type(error) is HostUnreachable
    assert f"nothing listens on port {sshd.port}" in str(error)
    assert re.search(r"Tried \d times", str(error))


@needs_sshd
def test_a_rejected_key_names_user_and_key_and_is_not_tried_again(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    error = failure(sshd.target(key=str(tmp_path / "other")), 60)
    assert type(error) is AuthenticationFailed
    assert f"'{getpass.getuser()}' with the key {tmp_path}/other" in str(error)
    assert f"ssh -F none -i {tmp_path}/other" in str(error)


@needs_sshd
def test_a_changed_host_key_is_refused_before_anything_is_sent(sshd: Sshd, tmp_path: Path) -> None:
    """SEC-5."""
    keygen(tmp_path / "other")
    sshd.know(tmp_path / "other.pub")
    error = failure(sshd.target(), 60)
    assert type(error) is HostKeyMismatch
    assert f"ssh-keygen -f {sshd.directory}/known -R [127.0.0.1]:{sshd.port}" in str(error)
    error = failure(sshd.target(host_keys="accept-new"), 60)
    assert type(error) is HostKeyMismatch
    assert "Accepted publickey" not in (sshd.directory / "log").read_text()


@needs_sshd
def test_a_host_key_swapped_after_the_first_use_is_refused(
    shell: SshShell, sshd: Sshd, tmp_path: Path, place: Path
) -> None:
    """SEC-5: also when the connection is made again."""
    sshd.stop()
    until(lambda: not masters(place))
    keygen(tmp_path / "other")
    shutil.copy(tmp_path / "other", sshd.directory / "host")
    sshd.start()
    with pytest.raises(HostKeyMismatch):
        shell.run(["true"])
    with pytest.raises(OSError, match="not the one in your known_hosts"):
        shell.reach("127.0.0.1", 1)


@needs_sshd
def test_an_unknown_host_key_is_accepted_only_if_said_so(
    sshd: Sshd, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """SEC-5."""
    (sshd.directory / "known").write_text("")
    error = failure(sshd.target(), 60)
    assert type(error) is HostKeyMismatch
    assert "not known yet" in str(error)
    with caplog.at_level(logging.INFO, "skyward.ssh"):
        opened(sshd.target(host_keys="accept-new"))
    assert "accept-new" in caplog.text
    assert (sshd.directory / "known").read_text()
    opened(sshd.target())


@needs_sshd
def test_a_port_that_drops_everything_is_a_time_out(sshd: Sshd) -> None:
    """Row 48: a listener whose queue is full answers no more than a firewall does."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            visitor = stack.enter_context(socket.socket())
            visitor.setblocking(False)
            visitor.connect_ex(full.getsockname())
        error = failure(sshd.target(port=full.getsockname()[1]), 2)
    assert type(error) is HostUnreachable
    assert "did not answer in time" in str(error)


@needs_sshd
def test_a_host_that_accepts_and_says_nothing_is_a_time_out(sshd: Sshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = failure(sshd.target(port=silent.getsockname()[1]), 2)
    assert type(error) is HostUnreachable
    assert "did not answer in time" in str(error)


@needs_sshd
def test_an_account_that_runs_nothing_is_said_in_words(make: Any) -> None:
    error = failure(make("ForceCommand echo This account is currently not available.; exit 1").target())
    assert "no program can be run there" in str(error)


@needs_sshd
def test_without_the_ssh_program_the_error_says_so(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "no ssh program on this computer" in str(failure(sshd.target()))


@needs_sshd
def test_a_host_that_is_still_starting_is_waited_for(make: Any, opened: Any) -> None:
    """Row 48."""
    sshd = make(started=False)
    starting = threading.Timer(0.5, sshd.start)
    starting.start()
    assert opened(sshd.target()).run(["echo", "up"]).out == b"up\n"
    starting.join()


@needs_sshd
def test_a_new_machine_that_does_not_know_our_key_yet_is_tried_again(sshd: Sshd) -> None:
    """Row 48: sshd answers before cloud-init has put the key in its place."""
    keys, later = sshd.directory / "id.pub", sshd.directory / "later.pub"
    keys.rename(later)
    shell = SshShell(sshd.target())
    put = threading.Timer(1.0, later.rename, [keys])
    put.start()
    try:
        shell.connect(soon(), booting=True)
        assert shell.run(["echo", "up"]).out == b"up\n"
    finally:
        put.join()
        shell.close()


@needs_sshd
def test_hosts_are_brought_up_in_parallel_and_the_broken_one_is_named_while_the_others_go_on(
    make: Any, place: Path
) -> None:
    """Row 48."""
    hosts = [make(), make(), make()]
    hosts[1].know(hosts[0].directory / "host.pub")
    shells = [SshShell(sshd.target()) for sshd in hosts]
    with ThreadPoolExecutor(3) as threads:
        connects = [threads.submit(shell.connect, soon(60)) for shell in shells]
        assert type(connects[1].exception()) is HostKeyMismatch
        assert str(hosts[1].port) in str(connects[1].exception())
        for good in (0, 2):
            connects[good].result()
            assert shells[good].run(["echo", "up"]).out == b"up\n"
    assert len(masters(place)) == 2
    for shell in shells:
        shell.close()


@needs_sshd
def test_both_sides_agree_on_a_cipher_even_if_one_lacks_the_fast_one(make: Any, opened: Any, ssh_config: Any) -> None:
    ssh_config("Ciphers aes256-cbc")
    shell = opened(make("Ciphers aes256-cbc").target(config=True))
    assert shell.run(["echo", "up"]).out == b"up\n"
    assert opened(make("Ciphers aes256-ctr").target()).run(["echo", "up"]).out == b"up\n"


@pytest.fixture
def ssh_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a text the user's ssh settings: ssh reads them from the home directory of the password file, not $HOME."""

    def write(text: str) -> None:
        (tmp_path / "ssh_config").write_text(textwrap.dedent(text))
        (tmp_path / "bin").mkdir(exist_ok=True)
        ssh = tmp_path / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=path)} -F {tmp_path}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{path}")

    path = os.environ["PATH"]
    return write


@needs_sshd
def test_aliases_count_and_settings_that_would_harm_do_not(
    sshd: Sshd, opened: Any, ssh_config: Any, tmp_path: Path, echo: int
) -> None:
    """SEC-6."""
    ssh_config(f"""\
        Host gpu1
            HostName 127.0.0.1
            Port {sshd.port}
            IdentityFile {sshd.directory}/id
            IdentitiesOnly yes
            UserKnownHostsFile {sshd.directory}/known
            LocalForward {echo} 127.0.0.1:22
            RemoteForward {echo} 127.0.0.1:22
            ExitOnForwardFailure yes
            RemoteCommand tmux attach
            RequestTTY force
            PermitLocalCommand yes
            LocalCommand touch {tmp_path}/pwned
            ControlMaster auto
            ControlPath {tmp_path}/theirs
            ControlPersist 10m
            StrictHostKeyChecking no
            LogLevel QUIET
            Compression yes
            EscapeChar ~
    """)
    shell = opened(SshTarget("gpu1"))
    assert shell.name == "gpu1"
    assert shell.run(["echo", "up"]).out == b"up\n"
    assert shell.run(["cat"], b"\n~.\n~.").out == b"\n~.\n~."
    shell.close()
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "theirs").exists()
    (sshd.directory / "known").write_text("")
    assert type(failure(SshTarget("gpu1"))) is HostKeyMismatch


@needs_sshd
def test_a_jump_host_is_used_and_leaves_nothing(make: Any, opened: Any, ssh_config: Any, place: Path) -> None:
    jump, far = make(), make()
    ssh_config(f"""\
        Host jump
            HostName 127.0.0.1
            Port {jump.port}
            IdentityFile {jump.directory}/id
            UserKnownHostsFile {jump.directory}/known
        Host far
            HostName 127.0.0.1
            Port {far.port}
            IdentityFile {far.directory}/id
            UserKnownHostsFile {far.directory}/known
            ProxyJump jump
    """)
    shell = opened(SshTarget("far"))
    assert shell.run(["echo", "up"]).out == b"up\n"
    assert "direct-tcpip" in (jump.directory / "log").read_text() or len(jump.logins()) == 1
    shell.close()
    until(lambda: not jump.logins() and not far.logins())
    (jump.directory / "known").write_text("")
    error = failure(SshTarget("far"))
    assert type(error) is HostKeyMismatch


@needs_sshd
def test_settings_that_ssh_does_not_understand_are_shown(ssh_config: Any) -> None:
    ssh_config("Bogus yes\n")
    assert "bogus" in str(failure(SshTarget("gpu1"), 60))


@needs_sshd
def test_the_agent_is_not_forwarded(sshd: Sshd, opened: Any, ssh_config: Any, tmp_path: Path) -> None:
    """SEC-6: the agent opens the door, and stays at home."""
    started = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL)
    try:
        until((tmp_path / "agent").is_socket)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
            subprocess.run(["ssh-add", "-q", str(sshd.directory / "id")], check=True)
            ssh_config("ForwardAgent yes\nForwardX11 yes\n")
            shell = opened(sshd.target(key=None, config=True))
            out = shell.run(["env"]).out
            assert b"SSH_CONNECTION" in out
            assert b"SSH_AUTH_SOCK" not in out
            assert b"DISPLAY" not in out
            shell.close()
    finally:
        started.terminate()
        started.wait()


def started_with(text: str) -> list[str]:
    """Processes on this computer, and so of its sshd, in whose environment a text was when they began."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return found


@needs_sshd
@pytest.mark.parametrize("sent", ["*", "CANARY_* LANG", "CANARY_?NE"])
def test_variables_that_the_users_settings_would_send_stay_at_home(
    make: Any, opened: Any, ssh_config: Any, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    """SEC-6, SEC-13: a server that takes every variable gets none, in the first session or in a later one."""
    sshd = make("AcceptEnv *")
    monkeypatch.setenv("CANARY_ONE", "canary-for-sendenv")
    ssh_config(f"SendEnv {sent}\n")
    shell = opened(sshd.target(config=True))
    assert b"canary" not in shell.run(["env"]).out
    assert [line for line in started_with("canary-for-sendenv") if "cat" in line] == []
    argv = shell.command(["env"])
    shell.close()
    assert b"canary" not in subprocess.run(argv, capture_output=True, check=True).stdout  # over a connection of its own


@needs_sshd
def test_a_host_key_is_checked_on_loopback_too(sshd: Sshd, opened: Any, ssh_config: Any) -> None:
    """SEC-5: whatever the user's settings say: a tunnel's near end is on loopback, and its far end anywhere."""
    ssh_config("NoHostAuthenticationForLocalhost yes\nVerifyHostKeyDNS yes\n")
    opened(sshd.target(config=True)).close()
    (sshd.directory / "known").write_text("")
    assert type(failure(sshd.target(config=True))) is HostKeyMismatch


WEAK = """
    NoHostAuthenticationForLocalhost yes
    VerifyHostKeyDNS yes
    StrictHostKeyChecking no
    ForwardAgent yes
    ForwardX11 yes
    ForwardX11Trusted yes
    GSSAPIDelegateCredentials yes
    PermitLocalCommand yes
    LocalCommand false
    RemoteCommand id
    Tunnel yes
    GatewayPorts yes
    AddKeysToAgent yes
    UpdateHostKeys yes
    ControlPersist yes
    BatchMode no
    RequestTTY force
    LocalForward 1234 localhost:22
    DynamicForward 1235
"""


@needs_sshd
def test_settings_that_would_weaken_ours_are_switched_off(ssh_config: Any) -> None:
    """SEC-5, SEC-6: as ssh itself reads its settings and our options together."""
    ssh_config(WEAK)
    argv = ["ssh", *options(SshTarget("gpu1"), 10), "-G", "gpu1"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    found = dict(line.partition(" ")[::2] for line in said.splitlines())
    off = "no", "false"
    for name in (
        "nohostauthenticationforlocalhost", "verifyhostkeydns", "forwardagent", "forwardx11", "forwardx11trusted",
        "gssapidelegatecredentials", "permitlocalcommand", "tunnel", "gatewayports", "addkeystoagent",
        "updatehostkeys", "controlpersist", "requesttty",
    ):  # fmt: skip
        assert found.get(name, "no") in off, name
    assert found["stricthostkeychecking"] in ("yes", "true")
    assert found["batchmode"] == "yes"
    assert found["clearallforwardings"] == "yes"
    assert found.get("remotecommand", "none") == "none"


@needs_sshd
def test_another_process_can_run_a_command_there_while_we_live_and_after(shell: SshShell, sshd: Sshd) -> None:
    argv = shell.command(["echo", "it's", "$HOME"])
    assert subprocess.run(argv, capture_output=True).stdout == b"it's $HOME\n"
    assert len(sshd.logins()) == 1
    shell.close()
    assert subprocess.run(argv, capture_output=True).stdout == b"it's $HOME\n"
    until(lambda: not sshd.logins())


@needs_sshd
def test_another_process_can_let_go_of_the_host_in_our_place(sshd: Sshd, place: Path) -> None:
    shell = SshShell(sshd.target())
    assert shell.ending() == ([], None)
    shell.connect(soon())
    argv, directory = shell.ending()
    assert directory is not None
    assert Path(directory).parent == place
    subprocess.run(argv, check=True, capture_output=True)
    until(lambda: not masters(place))
    shell.close()


@needs_sshd
def test_closing_leaves_nothing_and_may_be_done_twice(sshd: Sshd, place: Path, echo: int) -> None:
    """N17: no process, socket or file."""
    shell = SshShell(sshd.target())
    shell.close()
    with pytest.raises(BootstrapError):
        shell.connect(soon())
    shell = SshShell(sshd.target())
    shell.connect(soon())
    shell.reach("127.0.0.1", echo).close()
    assert list(place.iterdir())
    shell.close()
    shell.close()
    assert not masters(place)
    assert not list(place.iterdir())
    until(lambda: not sshd.logins())
    with pytest.raises(OSError, match="closed by this program"):
        shell.reach("127.0.0.1", echo)


@needs_sshd
def test_closing_stops_a_connect_that_is_waiting(make: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (make(started=False).port, silent.getsockname()[1]):
            shell = SshShell(SshTarget("127.0.0.1", port=port, config=False))
            with ThreadPoolExecutor(1) as threads:
                connecting = threads.submit(shell.connect, soon(600))
                until(lambda shell=shell: shell._directory)  # pyright: ignore[reportPrivateUsage]
                shell.close()
                assert isinstance(connecting.exception(60), BootstrapError)


@needs_sshd
def test_a_forked_child_neither_ends_nor_keeps_the_connection(shell: SshShell, place: Path) -> None:
    """Row 37."""
    (master,) = masters(place)
    asked, told = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # threads, and JAX if another test has it: we exec nothing
        child = os.fork()
    if child == 0:
        shell.close()
        os.read(asked, 1)
        os._exit(0)
    assert shell.run(["echo", "up"]).out == b"up\n"
    assert master.is_running()
    shell.close()
    assert not masters(place)
    os.write(told, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(asked)
    os.close(told)


@needs_sshd
def test_when_we_are_killed_ssh_ends_too(sshd: Sshd, place: Path) -> None:
    """Row 31."""
    program = textwrap.dedent(f"""
        import signal, sys, tempfile, time
        from skyward.api.shell import SshTarget
        from skyward.setup.ssh.shell import SshShell
        tempfile.tempdir = {str(place)!r}
        shell = SshShell({sshd.target()!r})
        shell.connect(time.monotonic() + 60)
        process = shell.start(["sh", "-c", "echo up; cat"], {{}}, sys.stderr.buffer)
        print(process.stdout.readline().decode(), end="", flush=True)
        signal.pause()
    """)
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    client.send_signal(signal.SIGKILL)
    client.communicate()
    until(lambda: not masters(place) and not sshd.logins())
    for left in place.iterdir():
        shutil.rmtree(left)
