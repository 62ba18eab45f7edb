"""Files of a pool on hosts, and names and values that are meant to do harm: what others plant, and what users write."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from tests.ssh.places import CACHE, ours, reached
from tests.support.hosts import HostSpec, Network
from tests.support.waiting import until

HARM = 'it\'s "x" $(touch {m}) `touch {m}`; touch {m} #\\ -rf \n ü \U0001f600 *'


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def large(size: int) -> bytearray:
    return bytearray(b"x" * size)


@sky.compute
def variables(*names: str) -> list[str]:
    return [os.environ[name] for name in names]


# ---------------------------------------------------------------------------------------------- values and names


def test_values_and_names_are_never_commands(
    net: Network, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-16: variables arrive byte by byte, files under their own names, and nothing in them is run."""
    marker = f"{CACHE}/pwned-value"
    env = {
        "QUOTES": HARM.format(m=marker),
        "OPTION": "-rf",
        "EMPTY": "",
        "LONG": "x" * (1 << 16),
        "LINES": "a\nexport HOME=/tmp\r\n\x01",
    }
    package = tmp_path / "$(touch pwned)'\"; touch pwned"
    package.mkdir()
    (package / "odd_module.py").write_text("ANSWER = 42\n")
    (package / "new\nline $(touch pwned) -rf").write_text("content\n")
    monkeypatch.chdir(tmp_path)

    @sky.compute
    def look() -> tuple[int, dict[str, str]]:
        import odd_module

        home = os.path.dirname(odd_module.__file__)
        return odd_module.ANSWER, {name: home for name in sorted(os.listdir(home)) if name != "__pycache__"}

    image = sky.Image(env=env, includes=[package.name])
    with sky.ComputePool(provider=reached(net, 2), image=image, name="-".join(["a.b_c"] * 10), console=False) as pool:
        assert variables(*env) @ pool == [list(env.values())] * 2
        for answer, found in look() @ pool:
            assert answer == 42
            assert list(found) == ["new\nline $(touch pwned) -rf", "odd_module.py"]
            assert {os.path.basename(home) for home in found.values()} == {package.name}
    for host in net.hosts[:2]:
        assert host.run(["find", "/home", "/tmp", CACHE, "-name", "pwned*"], user="root").stdout == ""
    assert not list(tmp_path.rglob("pwned"))
    assert not (cache / "pwned-value").exists()


@pytest.mark.timeout(200)
def test_variables_may_be_long_and_many(net: Network) -> None:
    """SEC-16: as long as one may be for a program that a body starts, and as much as it may be given in all."""
    env = {f"LONG_{i}": f"{i}" * 100_000 for i in range(9)}
    with sky.ComputePool(provider=reached(net, 1), image=sky.Image(env=env), console=False) as pool:
        assert variables(*env) >> pool == list(env.values())


@pytest.mark.parametrize(
    "name", ["a b", "$(touch pwned)", "a'b", 'a"b', "a\nb", "../a", "-rf", "", "a;b", "ü", "a" * 64]
)
def test_a_pools_name_is_a_plain_word(name: str) -> None:
    """SEC-16: it is part of the name of a directory on every host."""
    with pytest.raises(sky.errors.InvalidArgument, match="name="):
        sky.ComputePool(provider=sky.SSH(hosts=["h0"]), name=name, console=False)


# ------------------------------------------------------------------------------------------------------ includes


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, mode
    member.size = 1 if kind == tarfile.REGTYPE else 0
    return member


def archive(*members: tarfile.TarInfo) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return packed.getvalue()


def bomb() -> bytes:
    """A header that promises more than may be sent, and nothing behind it."""
    member = entry("bomb")
    member.size = 2 << 30
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(10 << 10)


HOSTILE = {
    "above": archive(entry("../pwned")),
    "hidden above": archive(entry("a/../../pwned")),
    "absolute": archive(entry("/home/sky/pwned")),
    "symlink": archive(entry("out", tarfile.SYMTYPE, "/home/sky"), entry("out/pwned")),
    "hard link": archive(entry("pwned", tarfile.LNKTYPE, "/home/sky/.ssh/authorized_keys")),
    "pipe": archive(entry("pwned", tarfile.FIFOTYPE)),
    "device": archive(entry("pwned", tarfile.CHRTYPE)),
    "deep": archive(*(entry("/".join(["pwned"] * depth), tarfile.DIRTYPE) for depth in range(1, 600))),
    "deep at once": archive(entry("/".join("d" * 1500) + "/pwned")),
    "bomb": bomb(),
    "cut": archive(entry("pwned"))[:700],
    "noise": b"no archive",
}
UNPACK = """
import io, sys
from pathlib import Path
from skyward.errors import BootstrapError
from skyward.transport.includes import unpack
try:
    unpack(io.BytesIO(sys.stdin.buffer.read()), Path("/home/sky/unpacked/includes"))
    print("taken")
except BootstrapError as exc:
    print("refused", exc)
"""


def test_a_hostile_archive_writes_nothing_on_a_host(net: Network) -> None:
    """SEC-19: at the receiving side, as the login user, with the host's own Python."""
    look = ["sh", "-c", "cd /home/sky && find . -name .ssh -prune -o -print | sort; rm -rf unpacked"]
    with sky.ComputePool(provider=reached(net, 1), console=False):
        python = next(p.argv[0] for p in net[0].processes("sky") if "skyward.node.keeper" in p.argv)

    def unpack(data: bytes) -> str:
        return net[0].run([python, "-P", "-c", UNPACK], data=data.decode("utf-8", "surrogateescape")).stdout

    before = net[0].run(look).stdout
    for name, data in HOSTILE.items():
        said = unpack(data)
        assert said.startswith("refused"), (name, said)
        assert net[0].run(look).stdout.replace("./unpacked\n", "") == before, name
    assert unpack(archive(entry("tool", mode=0o4777), entry("a/b"))) == "taken\n"
    modes = net[0].run(["sh", "-c", "cd /home/sky/unpacked/includes && stat -c '%n %a' . a/b tool"]).stdout
    assert modes.splitlines() == [". 700", "a/b 600", "tool 700"]
    net[0].run(look)


def test_what_looks_like_a_secret_stays_at_home(net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-20: decoys beside the code that is sent."""
    for name in ("code/__init__.py", "code/.env", "code/id_rsa", "code/key.pem", "code/.git/config", "code/.aws/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("decoy = 1\n")
    monkeypatch.chdir(tmp_path)
    with sky.ComputePool(provider=reached(net, 1), image=sky.Image(includes=["code"]), console=False) as pool:
        assert add(1, 2) >> pool == 3
        found = net[0].run(["find", f"{CACHE}/pools", "-path", "*/work/*", "-type", "f"], user="root").stdout
        assert [os.path.basename(line) for line in found.splitlines()] == ["__init__.py"]


# ---------------------------------------------------------------------------------------------- other users


PLANTS = r"""
mkdir /tmp/skyward /dev/shm/skyward /tmp/skyward-4194001-planted /dev/shm/skyward-4194002-planted
chmod 777 /tmp/skyward* /dev/shm/skyward*
for place in /tmp /dev/shm /var/tmp; do
    ln -s /nowhere $place/skyward-4194003-dangling
    ln -s $place/skyward-4194004-circle $place/skyward-4194004-circle
    ln -s /home/sky/precious $place/skyward-4194005-precious
done
touch /dev/shm/skyward-4194006-file
"""
LIST = "cd / && find tmp dev/shm var/tmp -user mallory ! -name 'pytest*' -printf '%p %l %y\n' | sort"
# what mallory can read, write or enter of sky's; -printf says which
PEEP = r"""
exec 2>/dev/null
find / -path /proc -prune -o -path /sys -prune -o -user sky \( -readable -o -writable -o -executable \) ! -type l -print
for pid in $(ls /proc); do
    [ "$(stat -c %U /proc/$pid)" = sky ] || continue
    for file in environ mem maps; do head -c 1 /proc/$pid/$file >/dev/null && echo /proc/$pid/$file; done
    ls /proc/$pid/fd >/dev/null && echo /proc/$pid/fd
    ls /proc/$pid/cwd/ >/dev/null && echo /proc/$pid/cwd
done
true
"""


@pytest.fixture(scope="module")
def lax(cache: Path) -> Iterator[tuple[Network, sky.ComputePool]]:
    """A pool on a host where every login gives its files away, with another user who has been there before.

    The cache is in the open home, as usual; only that of uv is the one of all tests.
    """
    spec = HostSpec(share={CACHE: cache}, setenv={"UV_CACHE_DIR": f"{CACHE}/uv", "UV_LINK_MODE": "copy"})
    with Network([spec], internet=True) as net:
        host = net[0]
        host.put("/home/sky/.bashrc", b"umask 000\n", user="sky")
        host.run(["sh", "-c", "mkdir -m 700 /home/sky/precious && touch /home/sky/precious/thesis"])
        host.run(["sh", "-c", PLANTS], user="mallory")
        with sky.ComputePool(
            provider=reached(net), image=sky.Image(includes=["pyproject.toml"]), console=False
        ) as pool:
            yield net, pool


def test_what_others_plant_is_neither_used_nor_touched(lax: tuple[Network, sky.ComputePool]) -> None:
    """SEC-7, SEC-21: links and directories with our names, where everybody may make some."""
    net, pool = lax
    before = net[0].run(["sh", "-c", LIST], user="root").stdout
    assert len(before.splitlines()) == 14
    assert len(large(3 << 20) >> pool) == 3 << 20
    with sky.ComputePool(provider=reached(net), console=False) as other:
        assert len(large(3 << 20) >> other) == 3 << 20
    assert net[0].run(["sh", "-c", LIST], user="root").stdout == before
    assert net[0].run(["ls", "/home/sky/precious"]).stdout == "thesis\n"


def test_others_see_nothing_of_a_pool(lax: tuple[Network, sky.ComputePool]) -> None:
    """SEC-21, SEC-22: whatever the umask; a body's own files are in a directory that others cannot enter."""

    @sky.compute
    def leave() -> str:
        with open("left.txt", "w") as file:
            file.write("mine")
        import stat

        return f"{os.getcwd()} {stat.S_IMODE(os.stat('left.txt').st_mode):o}"

    net, pool = lax
    cwd, mode = (leave() >> pool).split()
    assert mode == "666"  # the umask of the login is the user's affair, and so it is known to be at work here
    assert cwd.startswith("/home/sky/.cache/skyward/pools/")
    kept = large(3 << 20) > pool  # its result lies in /dev/shm until it is asked for
    kept.exception(60)
    found = set(net[0].run(["sh", "-c", PEEP], user="mallory", timeout=60).stdout.split())
    assert {path for path in found if not path.startswith((CACHE, "/dev/pts"))} == {"/home/sky", "/home/sky/.bashrc"}
    assert len(kept.result()) == 3 << 20


def test_a_full_memory_disk_sends_nothing_into_anothers_directory(lax: tuple[Network, sky.ComputePool]) -> None:
    """SEC-7, SEC-21: results go to /tmp then, but not into a directory that somebody has made there for them."""
    net, _ = lax
    host = net[0]
    host.run(["mount", "-o", "remount,size=2m", "/dev/shm"], user="root")
    try:
        with sky.ComputePool(provider=reached(net), console=False) as pool:
            assert len(large(5 << 20) >> pool) == 5 << 20
            spilled = "cd /tmp && find . -maxdepth 1 -user sky -name 'skyward-*' -printf '%m '"
            assert host.run(["sh", "-c", spilled], user="root").stdout == "700 "
        with sky.ComputePool(provider=reached(net), console=False) as pool:
            names = host.run(["sh", "-c", "cd /dev/shm && ls -d skyward-*"], user="mallory").stdout.split()
            host.run(["sh", "-c", 'cd /tmp && mkdir -m 777 -- "$@"; true', "sh", *names], user="mallory")
            assert len(large(5 << 20) >> pool) == 5 << 20  # the name that we take cannot be guessed
            theirs = host.run(["sh", "-c", 'cd /tmp && find "$@" -mindepth 1', "sh", *names], user="root")
            assert theirs.stdout == ""
        left = ["find", "/tmp", "-user", "sky", "-path", "*skyward*"]
        until(lambda: host.run(left, user="root").stdout == "", 20)
    finally:
        host.run(["mount", "-o", "remount,size=64m", "/dev/shm"], user="root")


CACHES = [
    ("/tmp/theirs", "mkdir -m 777 /tmp/theirs"),
    ("/tmp/theirs", "mkdir -m 755 /tmp/theirs"),
    ("/tmp/theirs", "ln -s /home/sky/own /tmp/theirs"),
    ("/tmp/theirs/", "ln -s /home/sky/own /tmp/theirs"),
    ("/tmp/theirs/cache", "mkdir -m 777 /tmp/theirs"),
    ("/tmp/theirs/cache", "mkdir -m 1777 /tmp/theirs"),
]


def test_a_cache_that_others_have_a_hand_in_is_refused() -> None:
    """SEC-21: programs are run from there. Nothing is put into it, and nothing of it is run."""
    with Network([HostSpec(setenv={"SKYWARD_CACHE": path}) for path, _ in CACHES], internet=True) as net:
        for host, (_, plant) in zip(net, CACHES, strict=True):
            host.run(["mkdir", "-m", "700", "/home/sky/own"])
            host.run(["sh", "-c", plant], user="mallory")
            provider = sky.SSH(
                hosts=[host.address], user="sky", key=str(net.key), known_hosts=str(net.known_hosts), ssh_timeout=20
            )
            with pytest.raises(sky.errors.BootstrapError, match=r"/tmp/theirs.*(belongs to another|cannot be written)"):
                sky.ComputePool(provider=provider, console=False).__enter__()
            assert host.run(["find", "/tmp/theirs/", "/home/sky/own", "-type", "f"], user="root").stdout == "", plant
            assert ours(host) == []
