"""Keys of a pool on hosts: the authority's stays with the client, a node's in the memory of its agent."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import skyward as sky
from tests.ssh.places import CACHE, reached, specs
from tests.support.hosts import Host, Network

BEGIN = "-----BEGIN " + "PRIVATE KEY-----"


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(scope="module")
def pair(net: Network) -> Iterator[sky.ComputePool]:
    """Two nodes that have worked: what they were given is where it will be."""
    image = sky.Image(pip=["distributed"])
    with sky.ComputePool(provider=reached(net, 2), image=image, console=False) as pool:
        assert add(1, 2) @ pool == [3, 3]
        yield pool


MEMORY = """
import json, os, re, sys
needles = {name: bytes.fromhex(text) for name, text in json.load(sys.stdin).items()}
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if not re.search(rb"-m\\0skyward[.]node[.]", file.read()):
                continue
        with open(f"/proc/{pid}/comm") as file:
            name = file.read().strip()
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            held = set()
            for row in maps:
                span, mode = row.split()[:2]
                start, end = (int(number, 16) for number in span.split("-"))
                if "rw" not in mode or row.rstrip().endswith("[vvar]"):
                    continue
                try:
                    memory.seek(start)
                    data = memory.read(end - start)
                except OSError:
                    continue
                held |= {what for what, needle in needles.items() if needle in data}
        found.append([name, sorted(held)])
    except (FileNotFoundError, ProcessLookupError):
        continue
print(json.dumps(found))
"""


def held(host: Host, **needles: bytes) -> list[tuple[str, set[str]]]:
    """Which of these bytes are in the memory of our processes on a host."""
    order = json.dumps({name: needle.hex() for name, needle in needles.items()})
    said = host.run(["/usr/bin/python3", "-I", "-c", MEMORY], user="root", data=order).stdout
    return [(name, set(found)) for name, found in json.loads(said)]


def test_the_authoritys_key_never_leaves_this_computer(net: Network, pair: sky.ComputePool) -> None:
    """SEC-4: neither as text nor as a number, in the memory of any process there; the certificate of the same is."""
    authority = pair._fleet.certificates.authority
    key: Any = authority._key
    number = key.private_numbers().private_value.to_bytes(32, "big")
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificate = ssl.PEM_cert_to_DER_cert(authority.pem)[40:140]  # as OpenSSL keeps it
    for host in net.hosts[:2]:
        found = held(host, big=number, little=number[::-1], text=text[60:120], begin=BEGIN.encode(), own=certificate)
        assert any("own" in what for _, what in found)
        assert not any(what & {"big", "little", "text"} for _, what in found)
        # the fork server and its runners, where the user's code is, have no key at all
        users = [what for name, what in found if name in ("skyward-forks", "skyward-runner")]
        assert users == [set(), set()]


def test_no_key_is_in_a_file_or_in_what_a_process_was_started_with(net: Network, pair: sky.ComputePool) -> None:
    """SEC-4: of the login user, in temporary directories, in the pool's own."""
    places = f"/home /tmp /var/tmp /dev/shm /run/lock /run/user {CACHE}/pools {CACHE}/logs {CACHE}/stage"
    script = f'exec 2>/dev/null; grep -rla --devices=skip -e "$0" {places}; grep -la -e "$0" /proc/[0-9]*/environ; true'
    pattern = BEGIN.replace(" ", "[ ]")  # other test runs on this computer look for keys in command lines
    for host in net.hosts[:2]:
        assert host.run(["sh", "-c", script, pattern], user="root").stdout == ""
        host.put("/tmp/control", f"{BEGIN}\n".encode(), mode="600")
        assert host.run(["sh", "-c", script, pattern], user="root").stdout == "/tmp/control\n"
        host.run(["rm", "/tmp/control"], user="root")


NOTE = """
import os, sys

def note(event, args):
    if event == "os.remove":
        try:
            fd = os.open(args[0], os.O_RDONLY | os.O_NONBLOCK, dir_fd=None if args[1] == -1 else args[1])
            held = b"PRIVATE" + b" KEY" in os.read(fd, 1 << 20)
            os.close(fd)
        except OSError:
            return
        with open("/home/sky/removed", "a") as file:
            file.write(f"{'key' if held else 'other'} {os.fspath(args[0])}\\n")

sys.addaudithook(note)
"""


def test_a_nodes_key_is_not_even_for_a_moment_in_a_file(cache: Path) -> None:
    """SEC-4: what our processes remove is looked at just before that."""
    image = sky.Image(pip=["distributed"])
    watching = {"PYTHONPATH": "/home/sky/watch"}
    with Network(specs(cache, 2, setenv=watching), internet=True) as net:
        for host in net:
            host.run(["mkdir", "/home/sky/watch"])
            host.put("/home/sky/watch/sitecustomize.py", NOTE.encode(), user="sky")
        with sky.ComputePool(provider=reached(net), image=image, console=False) as pool:
            assert add(1, 2) @ pool == [3, 3]
            with pool.dask() as client:
                assert client.submit(len, "ab").result() == 2
        removed = [line.split() for host in net for line in host.read("/home/sky/removed").splitlines()]
        assert removed
        assert [name for what, name in removed if what == "key"] == []


def test_a_dask_clients_key_is_not_even_for_a_moment_in_a_file_here(
    pair: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-4: on this computer."""
    looked: list[tuple[str, bool]] = []
    unlink = os.unlink

    def look(path: Any, *, dir_fd: int | None = None) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=dir_fd)
            looked.append((os.fspath(path), BEGIN.encode() in os.read(fd, 1 << 20)))
            os.close(fd)
        except OSError:
            pass
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", look)
    with pair.dask() as client:
        assert client.submit(len, "ab").result() == 2
    assert [name for name, key in looked if key] == []


def test_a_crash_leaves_no_core(cache: Path) -> None:
    """SEC-15: on hosts where programs leave one; in the processes with keys, and in a body that held a secret."""

    @sky.compute
    def crash() -> None:
        import ctypes

        held = os.environ["HF_TOKEN"] * 2
        ctypes.string_at(len(held) * 0)

    with Network(specs(cache, 1, limits={"core": -1}), internet=True) as net:
        host = net[0]
        image = sky.Image(env={"HF_TOKEN": "canary-in-memory"})
        with sky.ComputePool(provider=reached(net), image=image, console=False) as pool:
            with pytest.raises(sky.SkywardError):
                crash() >> pool
            assert add(1, 2) >> pool == 3
            search = [
                "find",
                "/home",
                "/tmp",
                "/var/tmp",
                "/dev/shm",
                f"{CACHE}/pools",
                "-name",
                "core*",
                "-size",
                "+0",
            ]
            assert host.run(search, user="root").stdout == ""
            ours = [p for p in host.processes("sky") if "-m skyward." in " ".join(p.argv)]
            texts = [host.run(["cat", f"/proc/{p.pid}/limits"], user="root", check=False).stdout for p in ours]
            limits = [text.split("Max core file size")[1].split()[0] for text in texts if text]  # some may have ended
            assert limits == ["0"] * len(limits)
            assert len(limits) >= 4  # keeper, agent, fork_server, runner
