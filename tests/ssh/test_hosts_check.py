"""`sky hosts check` on real hosts: healthy ones, and each thing that can be wrong with one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.cli import main
from tests.support.hosts import Host, HostSpec, Network
from tests.support.waiting import until

Check = Callable[..., "Result"]

HOSTILE = r"""#!/bin/bash
printf '@%s system \033]0;owned\007\033[2J\033[31mLinux\n' "$4"
printf '@%s user \r\033[1Aroot\n@%s problem tool \033[Hthere is no \302\233tar\n@%s done\n' "$4" "$4" "$4"
exec cat >/dev/null
"""


class Result:
    """What one run of the command has said."""

    def __init__(self, code: int, out: str) -> None:
        self.code, self.out = code, out
        self.findings: list[dict[str, str]] = [json.loads(line) for line in out.splitlines()]

    def of(self, host: Host | str, what: str) -> list[dict[str, str]]:
        name = host if isinstance(host, str) else host.address
        return [found for found in self.findings if found["host"].startswith(name) and found["what"] == what]

    def states(self, host: Host, what: str) -> list[str]:
        return [found["state"] for found in self.of(host, what)]

    def wrong(self) -> list[dict[str, str]]:
        # load: other tests may run beside this one
        return [found for found in self.findings if found["state"] != "ok" and found["what"] != "system"]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two plain hosts, one whose programs can be replaced, one whose disk is full, one without Python."""
    specs = [HostSpec(), HostSpec(), HostSpec(writable=True), HostSpec(home_size="20m"), HostSpec(hide=_PYTHONS)]
    with Network(specs) as network:
        network[3].fill_disk()
        yield network


_PYTHONS = ("/usr/bin/python3*", "/usr/local/bin/python3*")


@pytest.fixture
def check(five: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs the command on hosts of the network; the package index is one that nobody has."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://me:hunter2@{five.address}:9/simple/")

    def run(*hosts: Host | str, key: Path | None = None, words: tuple[str, ...] = ()) -> Result:
        names = [host if isinstance(host, str) else host.address for host in hosts]
        login = ["--user", "sky", "--key", str(key or five.key), "--known-hosts", str(five.known_hosts)]
        code = main(["hosts", "check", *names, *(login if hosts else ()), "--json", *words])
        return Result(code, capsys.readouterr().out)

    return run


def test_a_healthy_pair_is_well_and_is_left_as_it_was(five: Network, check: Check) -> None:
    """SEC-35."""
    before = [host.run(["find", "/home/sky", "/tmp", "/dev/shm"]).stdout for host in five]
    found = check(five[0], five[1])
    assert found.code == 0
    assert [each["what"] for each in found.wrong()] == ["packages", "packages"], found.out  # the index is not there
    for host, other in ((five[0], five[1]), (five[1], five[0])):
        assert found.states(host, "ssh") == ["ok"]
        assert "logged in as sky" in found.of(host, "ssh")[0]["text"]
        assert other.address in found.of(host, "network")[0]["text"]
        assert "bit/s" in found.of(host, "network")[0]["text"]
        assert found.states(host, "ports") == found.states(host, "clock") == ["ok"]
    assert "hunter2" not in found.out
    until(lambda: not [p for host in five for p in host.processes("sky")], 30)
    assert [host.run(["find", "/home/sky", "/tmp", "/dev/shm"]).stdout for host in five] == before


def test_for_people_there_is_one_line_for_each_finding(
    five: Network, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    login = ["--user", "sky", "--key", str(five.key), "--known-hosts", str(five.known_hosts)]
    assert main(["hosts", "check", five[0].address, f"{five[1].address}:23", *login]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "warning", "problem") for line in lines)
    assert sum("nothing listens on port 23" in line for line in lines) == 1
    assert last.startswith("2 hosts: 1 problem")


def test_hosts_that_ssh_does_not_reach_are_told_apart(five: Network, check: Check, tmp_path: Path) -> None:
    five[1].cut()
    try:
        found = check(five[0], five[1], f"{five[2].address}:23", "no-such-host.invalid", words=("--timeout", "3"))
    finally:
        five[1].heal()
    assert found.code == 1
    assert found.states(five[0], "ssh") == ["ok"]
    assert "did not answer in time" in found.of(five[1], "ssh")[0]["text"]
    assert "nothing listens on port 23" in found.of(five[2], "ssh")[0]["text"]
    assert "no-such-host.invalid" in found.of("no-such-host.invalid", "ssh")[0]["text"]
    assert all("ssh" in each["do"] for each in found.findings if each["what"] == "ssh" and each["state"] == "problem")


def test_a_key_that_is_not_let_in_and_a_host_key_that_has_changed(five: Network, check: Check, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    found = check(five[0], key=key)
    assert found.code == 1
    assert "it knows no user 'sky' with the key" in found.findings[0]["text"]
    known = tmp_path / "known_hosts"
    known.write_text(five.known_hosts.read_text().replace(five[1].address, five[0].address))
    lines = [line for line in known.read_text().splitlines() if five[0].address in line]
    known.write_text(f"{lines[-1]}\n")
    words = ("--user", "sky", "--key", str(five.key), "--known-hosts", str(known))
    changed = check(words=(five[0].address, *words))
    assert "its host key is not the one in your known_hosts file" in changed.findings[0]["text"]


def test_a_machine_that_is_named_twice_is_told(five: Network, check: Check) -> None:
    found = check(five[0], f"{five[0].address}:22")
    assert f"the same machine as {five[0].address}" in found.of(f"{five[0].address}:22", "network")[0]["text"]


def test_hosts_that_cannot_reach_each_other(
    five: Network, check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        f'[pools.lab]\nprovider = {{kind = "ssh", hosts = ["{five[0].address}", "{five[1].address}"], user = "sky", '
        f'key = "{five.key}", known_hosts = "{five.known_hosts}", network = "mesh"}}\n'
    )
    (tmp_path / "sky.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    five[0].cut_from(five[1])
    try:
        loose, strict = check(five[0], five[1]), check(words=("--pool", "lab"))
    finally:
        five[0].heal_from(five[1])
    assert loose.code == 0
    assert strict.code == 1
    for host, other in ((five[0], five[1]), (five[1], five[0])):
        assert loose.states(host, "network") == ["warning"]
        assert f"cannot connect to {other.address}" in loose.of(host, "network")[0]["text"]
        assert "groups of nodes (torch, jax) do not" in loose.of(host, "network")[0]["do"]
        assert strict.states(host, "network") == ["problem"]


def test_a_full_disk_and_a_host_without_python(five: Network, check: Check) -> None:
    found = check(five[3], five[4])
    assert found.code == 1
    assert found.states(five[3], "disk") == ["problem"]
    assert "MB are needed" in found.of(five[3], "disk")[0]["text"]
    assert found.states(five[4], "python") == ["warning"]  # nor does it reach an index
    assert "no Python" in found.of(five[4], "python")[0]["text"]
    assert "there is no Python there for it" in found.of(five[4], "network")[0]["text"]


def test_a_clock_that_is_off_and_gpus_that_differ(five: Network, check: Check) -> None:
    five[2].put("/usr/local/bin/date", b'#!/bin/sh\nexec /bin/date -d "2 hours ago" "$@"\n', mode="755")
    five[2].put("/usr/local/bin/nvidia-smi", b'#!/bin/sh\necho "NVIDIA L4, 23034, 1, 550.1"\n', mode="755")
    try:
        found = check(five[0], five[2])
    finally:
        five[2].run(["rm", "/usr/local/bin/date", "/usr/local/bin/nvidia-smi"], user="root")
    assert found.code == 0
    assert found.states(five[2], "clock") == ["warning"]
    assert "2.0 h behind this computer's" in found.of(five[2], "clock")[0]["text"]
    assert found.of(five[2], "gpus")[0]["text"] == "1 x NVIDIA L4 (22 GB), driver 550.1"
    assert found.of("all 2 hosts", "gpus")[0]["text"].startswith("they differ: none on")


def test_a_hostile_host_neither_reaches_the_terminal_nor_fills_the_memory(
    five: Network, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEC-35."""
    login = ["--user", "sky", "--key", str(five.key), "--known-hosts", str(five.known_hosts)]
    five[2].put("/usr/local/bin/flood", b"#!/bin/bash\nexec /usr/bin/yes\n", mode="755")
    five[2].put("/usr/local/bin/sh", HOSTILE.encode(), mode="755")
    try:
        assert main(["hosts", "check", five[2].address, *login]) == 1
        said = capsys.readouterr().out
        five[2].run(["cp", "/usr/local/bin/flood", "/usr/local/bin/sh"], user="root")
        flooded = check(five[0], five[2])
    finally:
        five[2].run(["rm", "/usr/local/bin/sh"], user="root")
    assert all(line.isprintable() for line in said.splitlines())
    assert "Linux" in said
    assert flooded.code == 1
    assert "prints more than 256 kB" in flooded.of(five[2], "ssh")[0]["text"]
    assert flooded.states(five[0], "ssh") == ["ok"]
    until(lambda: not five[2].processes("sky"), 30)


def test_a_shell_that_greets_is_no_problem_and_one_that_does_not_stop_is(five: Network, check: Check) -> None:
    five[0].put("/home/sky/.bashrc", b"echo welcome to h0\n", user="sky")
    try:
        assert check(five[0]).code == 0
        five[0].put("/home/sky/.bashrc", b"[ -e /tmp/first ] && yes || { touch /tmp/first; echo hello; }\n", user="sky")
        found = check(five[0])
    finally:
        five[0].run(["rm", "-f", "/home/sky/.bashrc", "/tmp/first"], user="root")
    assert found.code == 1
    assert "prints without end" in found.findings[0]["text"]
    until(lambda: not five[0].processes("sky"), 30)


def test_what_is_wrong_with_the_command_is_said_before_anything_is_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sky.toml").write_text('[pools.here]\nprovider = "local"\n')
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (["hosts", "check", "--pool", "here"], "this command is for"),
        (["hosts", "check", "bad host"], "cannot have ' ' in its name"),
        (["hosts", "check", "gpu1", "gpu1"], "named twice"),
    ):
        assert main(words) == 1
        assert said in capsys.readouterr().err
    for words, said in (  # none of these could be right anywhere
        (["hosts", "check"], "name some, as in `sky hosts check gpu1 gpu2`"),
        (["hosts", "check", "gpu1", "--pool", "here"], "not both"),
        (["hosts", "check", "gpu1", "--python", "three"], "such as 3.12"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
