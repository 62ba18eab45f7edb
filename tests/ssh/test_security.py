"""Who can reach a pool on hosts: its own members. Hosts have no firewall of ours, so every port looks after itself."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import skyward as sky
from skyward.plugins._ranks import Rendezvous
from skyward.transport.certificates import Identity
from tests.ssh import stranger
from tests.ssh.places import CACHE, left, reached, specs
from tests.support.dask_scheduler import listening_ports
from tests.support.hosts import Host, Network
from tests.support.hosts.machine import as_root
from tests.support.waiting import until

PROGRAM = ["/usr/bin/python3", "-I", "-c", Path(stranger.__file__).read_text()]
ALERT = 16  # bytes: all that TLS says to somebody who does not speak it


class Try(NamedTuple):
    """One attempt that was let in as far as a TCP connection, and what it was told."""

    host: str
    port: int
    manner: str
    payload: str
    answer: str


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def rally(flag: str) -> tuple[int, int]:
    """Forms a group with sockets of its own and holds them until a file appears; gives the port and who came."""
    info = sky.instance_info()
    if info is None:
        raise RuntimeError("not in a pool")
    Rendezvous("the group", info, info.ports["torch"], 30).meet()
    end = (info.head_addr, info.ports["jax"])
    with socket.create_server(end) if info.is_head else _connected(end) as sock:
        peers = [sock.accept()[0] for _ in range(info.total_nodes - 1)] if info.is_head else []
        Path(f"{flag}-{info.node}").touch()
        while not Path(flag).exists():
            time.sleep(0.02)
        for peer in peers:
            peer.close()
        return end[1], len(peers)


def _connected(end: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(end, timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.02)


@pytest.fixture
def marker(cache: Path) -> Iterator[str]:
    """Files, on the hosts and on this computer, that appear when somebody loads a stranger's pickle."""
    name = f"pwned-{secrets.token_hex(4)}"
    here = Path("/tmp") / name
    yield f"{CACHE}/{name} {here}"
    found = [path for path in (cache / name, here) if path.exists()]
    assert found == []


@contextmanager
def two_nodes(net: Network) -> Generator[sky.ComputePool]:
    """A pool on the first two hosts: an agent and a dask worker on each, and the scheduler on the first one."""
    before = len(ends(*net))
    image = sky.Image(pip=["distributed"])
    with sky.ComputePool(provider=reached(net, 2), image=image, console=False) as pool:
        assert len(ends(*net)) == before + 2
        pool.dask().close()
        assert len(ends(*net)) == before + 5
        yield pool


@pytest.fixture(scope="module")
def pair(net: Network) -> Iterator[sky.ComputePool]:
    """A pool that takes calls while others are at its doors."""
    with two_nodes(net) as pool:
        yield pool


def ports(host: Host) -> set[int]:
    """On which ports processes of the login user listen."""
    return {listener.port for listener in host.listeners("sky")}


def ends(*hosts: Host) -> list[tuple[str, int]]:
    return [(listener.address, listener.port) for host in hosts for listener in host.listeners("sky")]


def pem(identity: Identity) -> str:
    return identity.cert + identity.key


def visit(
    ask: Callable[[str], str],
    to: list[tuple[str, int]],
    marker: str,
    identity: str | None = None,
    say: list[str] | None = None,
    patience: float = 1.5,
) -> list[Try]:
    """Sends a stranger to ports; `ask` runs it somewhere with an input and gives its output."""
    assert to
    order = json.dumps({"ends": to, "identity": identity, "marker": marker, "say": say, "patience": patience})
    return [Try(*row) for row in json.loads(ask(order + "\n"))]


def from_outside(net: Network) -> Callable[[str], str]:
    return lambda order: net.outside.run(PROGRAM, order)


def as_mallory(host: Host) -> Callable[[str], str]:
    return lambda order: host.run(PROGRAM, user="mallory", data=order, timeout=60).stdout


def refused(tries: list[Try], manners: set[str]) -> None:
    """Nobody was told anything, in whatever manner he came."""
    assert {each.manner for each in tries} == manners
    told = [each for each in tries if len(bytes.fromhex(each.answer)) > (ALERT if each.manner == "plain" else 0)]
    assert told == []


# ---------------------------------------------------------------------------------------------- what is open


def test_only_ssh_and_ports_that_ask_for_a_certificate_are_open(
    net: Network, pair: sky.ComputePool, cache: Path, marker: str
) -> None:
    """SEC-1, SEC-2, SEC-3, SEC-7: all ports, asked from outside the pool while calls and a group run."""
    flag = f"{CACHE}/{secrets.token_hex(4)}"
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            assert add(1, 2) >> pair == 3

    with two_nodes(net) as group, ThreadPoolExecutor(2) as threads:
        ours = [ports(host) for host in net]
        calls, formed = threads.submit(busy), threads.submit(lambda: rally(flag) @ group)
        try:
            until(lambda: formed.done() or all((cache / f"{Path(flag).name}-{node}").exists() for node in range(2)))
            open_ports = [set(host.open_ports()) for host in net]
            addresses = {listener.address for host in net for listener in host.listeners("sky")}
            tries = visit(from_outside(net), ends(*net), marker)
        finally:
            (cache / Path(flag).name).touch()
            stop.set()
        (port, came), _ = formed.result(60)
        calls.result(60)
    assert came == 1
    assert [len(found) for found in ours] == [6, 4, 0]
    assert open_ports == [{22, port, *ours[0]}, {22, *ours[1]}, {22}]
    assert addresses == {net[0].address, net[1].address}
    refused([each for each in tries if each.port != port], {"plain", "anonymous"})


def test_nothing_listens_on_all_addresses_or_by_other_means(net: Network, pair: sky.ComputePool) -> None:
    """SEC-2: no wildcard address, no UDP, no socket of the abstract namespace, which has no permissions."""
    assert add(1, 2) @ pair == [3, 3]
    for host in net.hosts[:2]:
        assert {listener.address for listener in host.listeners("sky")} == {host.address}
        tables = host.run(["cat", "/proc/net/udp", "/proc/net/udp6", "/proc/net/unix"], user="root").stdout
        rows = [line.split() for line in tables.splitlines()]
        assert [row for row in rows if len(row) > 10 and row[7] == "20001"] == []
        assert [row for row in rows if row[-1].startswith("@")] == []


@pytest.mark.parametrize(("count", "network"), [(1, "auto"), (2, "star")])
def test_without_groups_everything_is_on_loopback(net: Network, marker: str, count: int, network: Any) -> None:
    """SEC-1, SEC-2, SEC-3: then ssh is all that is open, and other users of the host are refused, too."""
    before = [ports(host) for host in net]
    with sky.ComputePool(provider=reached(net, count, network=network), console=False) as pool:
        assert add(1, 2) @ pool == [3] * count
        for index, host in enumerate(net.hosts[:count]):
            mine = [each for each in host.listeners("sky") if each.port not in before[index]]
            assert {listener.address for listener in mine} == {"127.0.0.1"}
            assert set(host.open_ports()) == {22, *before[index]}
            refused(visit(as_mallory(host), [each[:2] for each in mine], marker), {"plain", "anonymous"})
        assert add(1, 2) @ pool == [3] * count


# ------------------------------------------------------------------------------------------------ who may enter


def test_another_pools_certificate_opens_nothing(net: Network, pair: sky.ComputePool, marker: str) -> None:
    """SEC-3, SEC-4, SEC-7, row 39: with its own certificate a stranger gets as far as any member, elsewhere nowhere."""
    own = ends(*net)
    with two_nodes(net) as other:
        theirs = [end for end in ends(*net) if end not in own]
        authorities = [other._fleet.certificates.authority, other._fleet.dask._authority]
        foreign = [pem(authority.issue("node-0")) for authority in authorities if authority]
        tries = [visit(from_outside(net), own, marker, each) for each in foreign]
        # an agent waits for the client's word before it says that it has no such buffer
        control = [visit(from_outside(net), theirs, marker, each, ["fetch"], patience=30) for each in foreign]
        assert add(1, 2) @ other == [3, 3]
    for each in tries:
        refused(each, {"plain", "anonymous", "certified"})
    # the same attempts, by somebody who belongs there: agents and dask have an authority each
    assert [len([t for t in each if t.manner == "certified" and t.answer]) for each in control] == [2, 3]
    for each in control:
        refused([t for t in each if t.manner != "certified"], {"plain", "anonymous"})
    assert add(1, 2) @ pair == [3, 3]


def test_users_of_a_host_get_no_further_than_strangers(net: Network, pair: sky.ComputePool, marker: str) -> None:
    """SEC-3, SEC-7: on the node itself, and from another host of the pool."""
    for host in net.hosts[:2]:
        refused(visit(as_mallory(host), ends(*net), marker), {"plain", "anonymous"})
    assert add(1, 2) @ pair == [3, 3]


def test_no_port_speaks_http_even_to_a_member(net: Network, pair: sky.ComputePool, marker: str) -> None:
    """SEC-23, SEC-24: there is no dashboard and no notebook."""
    member = pem(pair._fleet.certificates.authority.issue("client"))
    answers = [bytes.fromhex(each.answer) for each in visit(from_outside(net), ends(*net), marker, member, ["http"])]
    assert len(answers) == 3 * 5
    assert not [answer for answer in answers if b"HTTP" in answer or b"html" in answer]
    assert add(1, 2) @ pair == [3, 3]


CROWD = """
import socket, sys
held = [socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) for _ in range(int(sys.argv[3]))]
print("here", flush=True)
sys.stdin.read()
"""


def test_a_crowd_that_says_nothing_shuts_nobody_out(net: Network, whole: Network) -> None:
    """SEC-3: more connections than an agent may have open; calls go on, and a client that has to come again gets in."""
    with two_nodes(net) as pool:
        end = pool._fleet.by_node[1].keeper.ports[1]
        lines = net[1].run(["ss", "-Hltnp", "sport", f"= {end[1]}"]).stdout
        for pid in {found[1] for found in re.finditer(r"pid=(\d+)", lines)}:
            net[1].run(["prlimit", "--pid", pid, "--nofile=128:128"])
        argv = ["/usr/bin/python3", "-I", "-c", CROWD, end[0], str(end[1]), "160"]
        crowd = subprocess.Popen(net.outside.entered(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with crowd:
            try:
                assert crowd.stdout is not None
                assert crowd.stdout.readline() == b"here\n"
                assert add(1, 2) @ pool == [3, 3]
                with hung_up(net[1]):
                    calls = [add(1, i) > pool for i in range(10)]
                assert [call.result(60) for call in calls] == [1 + i for i in range(10)]
                until(lambda: pool.current_nodes() == 2)
                assert add(1, 2) @ pool == [3, 3]
            finally:
                crowd.kill()


@contextmanager
def hung_up(host: Host) -> Generator[None]:
    """The client's connections to a host are broken by what is done meanwhile; then it may come again."""
    host.reset_client()
    yield
    until(lambda: not [p for p in host.processes() if "sshd: sky" in " ".join(p.argv)])
    host.heal_client()


# ---------------------------------------------------------------------------------------------- this computer


USE = """
import socket, sys
for name in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        print("connected")
    except PermissionError:
        print("denied")
    except OSError:
        print("gone")  # a tunnel may be made again just now
"""


def test_the_near_ends_of_tunnels_are_the_users_own(net: Network, pair: sky.ComputePool) -> None:
    """SEC-25: another user of this computer cannot open a socket that leads to a node; no port does, also for dask."""
    ports = listening_ports()
    with pair.dask() as client:
        assert client.submit(pow, 2, 10).result(timeout=60) == 1024
        assert listening_ports() <= ports
        shells = [host.keeper.shell for host in pair._fleet.by_node.values()]

        def near_ends() -> list[str]:
            return [str(p) for s in shells for p in Path(s._directory).iterdir() if p.is_socket()]  # type: ignore[attr-defined]

        other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

        def all_say(who: list[str], word: str) -> bool:
            sockets = near_ends()
            argv = as_root([*who, "/usr/bin/python3", "-I", "-c", USE, *sockets])
            words = set(subprocess.check_output(argv, text=True).split())
            assert words <= {word, "gone"}
            return len(sockets) >= 4 and words == {word}

        until(lambda: all_say(["env"], "connected"))
        until(lambda: all_say(other, "denied"))
    assert add(1, 2) @ pair == [3, 3]


def test_a_host_key_that_was_swapped_is_refused(cache: Path) -> None:
    """SEC-5: for a new pool, and for one that has to connect again; whoever has the host now is sent nothing."""
    with Network(specs(cache, 1), internet=True) as net:
        host = net[0]
        provider = reached(net, lease=5, ssh_timeout=5)
        with sky.ComputePool(provider=provider, console=False) as pool:
            assert add(1, 2) >> pool == 3
            files, logins = left(host), host.log.count("Accepted")
            host.swap_host_key()
            with pytest.raises(sky.errors.HostKeyMismatch, match=host.address.replace(".", r"\.")):
                sky.ComputePool(provider=provider, console=False).__enter__()
            assert left(host) == files
            seen = len(host.log)
            with hung_up(host):
                call = add(1, 2) > pool
            until(lambda: "[preauth]" in host.log[seen:])
            with pytest.raises(sky.SkywardError):
                call.result(60)
        assert host.log.count("Accepted") == logins


def test_the_users_agent_stays_at_home(net: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SEC-6: neither a variable nor a socket of it is on the host, whatever the user's settings forward."""

    @sky.compute
    def environment() -> dict[str, str]:
        import os

        return dict(os.environ)

    path = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        until(path.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        monkeypatch.setenv("DISPLAY", ":0")
        subprocess.run(["ssh-add", "-q", str(net.key)], check=True)
        with sky.ComputePool(provider=reached(net, 1), console=False) as pool:
            found = environment() >> pool
            assert not {"SSH_AUTH_SOCK", "DISPLAY"} & set(found)
            listing = ["find", "/tmp", "-name", "ssh-*", "-o", "-name", "agent.*"]
            assert net[0].run(listing, user="root").stdout == ""
    finally:
        agent.kill()
        agent.wait()
