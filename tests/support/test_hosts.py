"""The test hosts: they are hosts of their own, can be broken in all the ways that are promised, and leave nothing."""

from __future__ import annotations

import http.server
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Host, HostsError, HostSpec, Network, machine
from tests.support.hosts.fixtures import hosts, hosts_possible, make_network
from tests.support.hosts.probes import answers, reaches, ssh
from tests.support.waiting import until

__all__ = ["hosts", "hosts_possible", "make_network"]

ROOT = Path(__file__).resolve().parents[2]


def greeted(host: Host) -> socket.socket:
    """A connection to the host's sshd on which nothing is waiting to be read."""
    connection = socket.create_connection((host.address, host.port), timeout=20)
    read = b""
    while not read.endswith(b"\n"):
        read += connection.recv(100)
    return connection


def silent(connection: socket.socket) -> bool:
    """Whether nothing is heard for a second."""
    connection.settimeout(1)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    return False


@contextmanager
def talk(net: Network, alias: str) -> Generator[Callable[[str], str]]:
    """An open login that gives back, at its end, what it is told."""
    argv = ["ssh", "-F", str(net.config), alias, "echo in; exec cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as login:
        assert login.stdout
        assert login.stdout.readline() == "in\n"
        yield lambda words: login.communicate(words, timeout=20)[0]


@contextmanager
def running(host: Host, argv: list[str]) -> Generator[None]:
    """A program on the host, until the end of the block."""
    with host.start(argv):
        yield
        for process in host.processes("sky"):
            host.signal(process.pid)


@pytest.fixture
def whole(hosts: Network) -> Iterator[Network]:
    """The shared hosts, which must be whole again after the test."""
    yield hosts
    assert [answers(host.address) for host in hosts.hosts] == [True, True, True]


def test_hosts_are_reached_by_ssh_with_strict_host_keys(hosts: Network, tmp_path: Path) -> None:
    assert [ssh(hosts, name, "hostname").stdout.strip() for name in ("h0", "h1", "h2")] == ["h0", "h1", "h2"]
    assert len({line.split()[2] for line in hosts.known_hosts.read_text().splitlines()}) == 3
    hosts.known_hosts.rename(tmp_path / "known_hosts")
    try:
        refused = ssh(hosts, "h0", "hostname")
    finally:
        (tmp_path / "known_hosts").rename(hosts.known_hosts)
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


def test_a_home_can_be_given_the_aliases_and_a_terminal_can_be_had(hosts: Network, tmp_path: Path) -> None:
    hosts.ssh_config(tmp_path)
    argv = ["ssh", "-tt", "-F", str(tmp_path / ".ssh" / "config"), "h1", "id -un; tty"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sky", "/dev/pts/0"]


def test_each_host_has_its_own_address_name_processes_and_directories(hosts: Network) -> None:
    one, other = hosts[0], hosts[1]
    assert one.run(["hostname"]).stdout == "h0\n"
    assert f"inet {one.address}/24" in one.run(["ip", "-4", "addr", "show", "eth0"]).stdout
    assert one.address not in other.run(["ip", "addr"]).stdout
    assert one.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
    for place in ("/home/sky", "/tmp", "/var/tmp", "/dev/shm"):
        one.run(["touch", f"{place}/mark"])
        assert "mark" not in other.run(["ls", place]).stdout
        assert not (Path(place) / "mark").exists()
        one.run(["rm", f"{place}/mark"])
    with running(one, ["sleep", "1234"]):
        found = until(lambda: [p for p in one.processes("sky") if p.argv == ["sleep", "1234"]])
        assert not [p for p in other.processes() if "1234" in p.argv]
        assert one.run(["cat", f"/proc/{found[0].pid}/cmdline"]).stdout == "sleep\x001234\x00"


def test_users_see_what_users_see(hosts: Network) -> None:
    """The ground for SEC-21 and SEC-22: another user on the same host, and a home that others may look into."""
    host = hosts[0]
    assert host.run(["id", "-un"], user="mallory").stdout == "mallory\n"
    assert host.run(["ls", "/root"], check=False).returncode
    assert host.run(["cat", "/etc/shadow"], check=False).returncode
    assert host.run(["ls", "/home/sky"], user="mallory").returncode == 0
    assert host.run(["ls", "/home/sky/.ssh"], user="mallory", check=False).returncode
    assert host.run(["touch", "/home/sky/x"], user="mallory", check=False).returncode
    assert "Permission denied" in ssh(hosts, "h0", "id", user="root").stderr


def test_the_machines_own_files_are_safe_even_from_root_and_the_checkout_is_hidden(hosts: Network) -> None:
    for directory in ("/usr", "/opt", "/"):
        assert "Read-only" in hosts[0].run(["touch", f"{directory}/mark"], user="root", check=False).stderr
    hosts[0].run(["touch", "/etc/mark"], user="root")
    assert not Path("/etc/mark").exists()
    assert hosts[0].run(["ls", str(ROOT)], check=False).stdout == ""


def test_a_kill_ends_everything_on_a_host_and_nothing_elsewhere(whole: Network) -> None:
    """The tool of row 14: peers see the end, and new connections are refused."""
    victim, bystander = whole[0], whole[1]
    victim.run(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo kept > ~/kept; echo lost > /tmp/lost"])
    until(lambda: [p for p in victim.processes("sky") if p.argv[0] == "sleep"])
    with talk(whole, "h1") as say, greeted(victim) as connection:
        victim.kill()
        assert not victim.alive
        assert connection.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            answers(victim.address)
        with pytest.raises(HostsError, match=r"h0 is dead; restart\(\) brings it back"):
            victim.processes()
        assert say("still here") == "still here"
    assert answers(bystander.address)

    victim.restart()
    assert victim.processes("sky") == []
    assert ssh(whole, "h0", "cat kept; ls /tmp").stdout == "kept\n"
    victim.run(["rm", "kept"])


def test_a_silent_kill_is_heard_by_nobody(whole: Network) -> None:
    """The tool of row 13."""
    with greeted(whole[1]) as connection:
        whole[1].kill(silent=True)
        assert silent(connection)
        assert not answers(whole[1].address, seconds=1)
        whole[1].restart()
        connection.settimeout(20)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # the new host knows nothing of it
            while connection.send(b"x"):
                time.sleep(0.05)


def test_a_cut_link_loses_everything_without_a_word_and_a_healed_one_goes_on(whole: Network) -> None:
    """The tool of rows 28 and 29."""
    host = whole[0]
    with talk(whole, "h0") as say:
        host.cut()
        host.cut()  # twice is once
        assert not answers(host.address, seconds=1)
        assert not reaches(whole[1], host.address, seconds=1)
        assert answers(whole[1].address)
        timer = threading.Timer(0.5, host.heal)
        timer.start()
        assert say("said in the dark") == "said in the dark"
        timer.join()
    host.heal()


def test_two_hosts_are_parted_while_all_else_goes_on(whole: Network) -> None:
    """The tool of row 23."""
    one, other, third = whole.hosts
    one.cut_from(other)
    assert not reaches(one, other.address, seconds=1)
    assert not reaches(other, one.address, seconds=1)
    assert reaches(one, third.address)
    assert answers(one.address)
    assert answers(other.address)
    one.heal_from(other)
    assert reaches(one, other.address)


def test_the_client_is_cut_from_all_hosts_or_from_one(whole: Network) -> None:
    where = ["ssh", "-F", str(whole.config), "-o", "ConnectTimeout=1", "h0", "echo ${SSH_CLIENT%% *}"]
    assert whole.client_run(where, capture_output=True, text=True).stdout.strip() == whole.ports[1].address
    whole.cut_client()
    assert not answers(whole[0].address, seconds=1)
    assert "timed out" in whole.client_run(where, capture_output=True, text=True).stderr
    assert reaches(whole[0], whole[1].address)
    whole.heal_client()
    assert answers(whole[0].address)
    whole[0].cut_client()
    assert not answers(whole[0].address, seconds=1)
    assert answers(whole[1].address)
    assert reaches(whole[1], whole[0].address)
    whole[0].heal_client()


def test_connections_of_the_client_are_reset(whole: Network) -> None:
    with greeted(whole[0]) as connection:
        whole[0].reset_client()
        with pytest.raises(ConnectionRefusedError):
            answers(whole[0].address)
        with pytest.raises(ConnectionResetError):
            connection.send(b"x")
            connection.recv(1)
    assert reaches(whole[1], whole[0].address)
    whole[0].heal_client()


def test_packets_are_lost_at_random(whole: Network) -> None:
    whole[0].lossy(100)
    assert not answers(whole[0].address, seconds=1)
    whole[0].lossy(20)
    assert "numgen random mod 100 < 20 drop" in whole.switch.run(
        ["nft", "list", "chain", "bridge", "faults", "loss_h0"]
    )
    whole[0].lossy(0)


def test_links_are_slowed_in_both_directions(whole: Network) -> None:
    def limits() -> list[bool]:
        said = [whole.switch.run(["tc", "qdisc", "show", "dev", name]) for name in ("h0", "machine")]
        said += [whole[0].place.run(["tc", "qdisc", "show", "dev", "eth0"])]
        said += [machine.root(["tc", "qdisc", "show", "dev", whole.ports[0].interface])]
        return ["tbf" in text and "rate 50Mbit" in text for text in said]

    assert limits() == [False, False, False, False]
    whole[0].slow(50)
    assert limits() == [True, False, True, False]
    whole.slow_client(50)
    assert limits() == [True, True, True, True]
    assert ssh(whole, "h0", "wc -c", said="x" * 200_000).stdout == "200000\n"
    whole[0].slow(None)
    whole.slow_client(None)
    assert limits() == [False, False, False, False]


def test_bytes_are_counted_on_the_links_that_they_cross(hosts: Network) -> None:
    size = 5_000_000
    before = [host.bytes() for host in hosts.hosts]
    client = hosts.client_bytes()
    assert ssh(hosts, "h0", "wc -c", said="x" * size).stdout == f"{size}\n"
    got = [host.bytes().received - was.received for host, was in zip(hosts.hosts, before, strict=True)]
    assert size < got[0] < 1.1 * size
    assert size < hosts.client_bytes().sent - client.sent < 1.1 * size
    assert max(got[1:]) < size / 50
    assert hosts[0].bytes().sent > before[0].sent


def test_frozen_processes_answer_nothing_until_they_thaw(whole: Network) -> None:
    """The tool of row 20."""
    whole[0].freeze()
    assert not answers(whole[0].address, seconds=1)
    whole[0].thaw()


def test_a_port_scan_from_outside_finds_what_listens_there(whole: Network) -> None:
    """The tool of SEC-1 and SEC-2."""
    host = whole[0]
    script = "import socket, time; s = [socket.create_server(w) for w in {!r}]; time.sleep(1000)"
    with running(host, ["python3", "-c", script.format([(host.address, 45678), ("127.0.0.1", 45679)])]):
        until(lambda: host.listeners("sky") == [(host.address, 45678, "sky"), ("127.0.0.1", 45679, "sky")])
        assert host.open_ports() == [22, 45678]


def test_another_host_key_is_refused_by_ssh(make_network: Callable[..., Network]) -> None:
    """The tool of SEC-5."""
    net = make_network(1)
    assert ssh(net, "h0", "true").returncode == 0
    net[0].swap_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh(net, "h0", "true").stderr


def test_hosts_can_be_special(make_network: Callable[..., Network], tmp_path: Path) -> None:
    """The tools of rows 26, 27 and 51."""
    plain = HostSpec(share={"/run/shared": tmp_path}, setenv={"WORDS": 'a "b" $c \\ d', "UV_CACHE_DIR": "/run/shared"})
    small = HostSpec(home_size="10m", root_login=True, limits={"nofile": 256}, share={"/run/shared": tmp_path})
    loose = HostSpec(root_login=True, writable=True)
    poor = HostSpec(port=2222, hide=["/usr/bin/python3*", "/usr/bin/tar"], read_only_home=True, noexec_tmp=True)
    net = make_network([plain, small, poor, loose])

    assert (
        ssh(net, "h0", "printenv WORDS UV_CACHE_DIR; echo x > /run/shared/x").stdout == 'a "b" $c \\ d\n/run/shared\n'
    )
    assert ssh(net, "h1", "cat /run/shared/x; ulimit -n").stdout == "x\n256\n"

    assert ssh(net, "h1", "id -un", user="root").stdout == "root\n"
    net[1].fill_disk()
    assert "No space left" in ssh(net, "h1", "echo x > x").stderr
    net[1].free_disk()
    assert ssh(net, "h1", "echo kept > x; cat x").stdout == "kept\n"
    net[1].restart()
    assert net[1].read("/home/sky/x") == "kept\n"
    with pytest.raises(HostsError, match="has no size of its own"):
        net[0].fill_disk()

    assert (
        ssh(net, "h3", "echo x > /usr/bin/mark; echo x > /var/lib/dpkg/mark; cat /usr/bin/mark", user="root").stdout
        == "x\n"
    )
    assert not Path("/usr/bin/mark").exists()
    assert not Path("/var/lib/dpkg/mark").exists()

    said = ssh(net, "h2", "python3 --version; command -v tar python3.11; touch x; cp /bin/true /tmp/t; /tmp/t")
    assert said.stdout == ""
    assert "python3: command not found" in said.stderr
    assert "Read-only file system" in said.stderr
    assert "/tmp/t: Permission denied" in said.stderr


def test_a_private_network_a_star_and_two_networks_at_once(make_network: Callable[..., Network]) -> None:
    net = make_network(2, private=True)
    one, other = net.hosts
    assert one.private_address
    assert other.private_address
    assert reaches(one, other.private_address)
    assert one.bytes(private=True).received > 0
    one.cut_from(other)
    assert not reaches(one, other.private_address, seconds=1)

    star = make_network(2, star=True)
    assert [answers(host.address) for host in star.hosts] == [True, True]
    assert not reaches(star[0], star[1].address, seconds=1)
    assert not reaches(one, star[0].address, seconds=1)
    star.close()
    assert answers(one.address)


def test_hosts_reach_the_world_through_a_proxy(make_network: Callable[..., Network]) -> None:
    class Echo(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    net = make_network(1, internet=True)
    proxy = net.setenv["http_proxy"]
    assert f"http_proxy={proxy}\n" in ssh(net, "h0", "env").stdout
    ask = """import socket, sys
to, *said = sys.argv[1:]
with socket.create_connection(to.removeprefix("http://").split(":")) as proxy:
    for text in said:
        proxy.sendall(text.encode())
        print(proxy.recv(12).decode())
    print(proxy.makefile().read())"""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{server.server_port}"
        plain = net[0].run(["python3", "-c", ask, proxy, f"GET http://{where}/a?b=c HTTP/1.0\r\n\r\n"])
        assert plain.stdout.startswith("HTTP/1.0 200")
        assert plain.stdout.endswith("\n/a?b=c\n")
        words = [f"CONNECT {where} HTTP/1.1\r\n\r\n", "GET /through HTTP/1.0\r\n\r\n"]
        tunnel = net[0].run(["python3", "-c", ask, proxy, *words])
        assert tunnel.stdout.startswith("HTTP/1.1 200")
        assert tunnel.stdout.endswith("\n/through\n")
        server.shutdown()
