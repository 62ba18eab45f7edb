"""Warm starts on the test cloud: an image of a machine holds its disk, and machines start with that disk."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.machines.ledger import state_dir
from skyward.providers.aws.provider import AWS
from tests.cloud.machines import Hosts
from tests.support.cloud import Cloud, Instance
from tests.support.hosts import HostSpec, Network, lacks_python, unavailable

_PATH = "/run/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SECRET = "a-token-that-no-disk-may-have"


class DiskHosts(Hosts):
    """Hosts whose disks can be kept: homes, keys of the host and of logins, and the machine's id."""

    def image_made(self, instance: Instance, image: str) -> None:
        script = "cd / && tar -cf - home/sky root etc/machine-id $(ls -d etc/ssh/ssh_host_* 2>/dev/null || true)"
        with self.disk(image).open("wb") as file:
            assert self.of[instance.id].start(["sh", "-c", script], user="root", stdout=file).wait(120) == 0

    def machine_started(self, instance: Instance) -> None:
        super().machine_started(instance)
        if self.disk(instance.image).exists():
            with self.disk(instance.image).open("rb") as file:
                assert (
                    self.of[instance.id].start(["tar", "-C", "/", "-xpf", "-"], user="root", stdin=file).wait(120) == 0
                )

    def disk(self, image: str) -> Path:
        return self._directory / f"{image}.tar"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cloud, Hosts]]:
    """Each host has a disk of its own: nothing is shared between them."""
    if reason := unavailable() or lacks_python():
        pytest.skip(reason)
    with Network([HostSpec(setenv={"PATH": _PATH}, root_login=True)] * 4, internet=True, idle=True) as network:
        hosts = DiskHosts(network, tmp_path_factory.mktemp("machines"))
        with Cloud(hosts) as cloud:
            hosts.end = cloud.end
            yield cloud, hosts
        hosts.close()


@sky.compute
def told() -> tuple[str, str]:
    import os

    import mine  # type: ignore[import-not-found] - included

    return os.environ["HF_TOKEN"], mine.WORD


def command(*words: str) -> str:
    argv = [sys.executable, "-m", "skyward", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=240).stdout


def test_a_warm_pool_finds_its_environment_at_the_first_look_and_its_image_holds_no_secret(
    cloud: Cloud, hosts: DiskHosts, aws: Callable[..., AWS], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-11: what is kept is the environment, and nothing of a pool, its user or its machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("WORD = 'a word of my own files'\n")
    image = sky.Image(warm=True, includes=["mine.py"], env={"HF_TOKEN": sky.Secret(SECRET)})

    def opened(name: str) -> tuple[list[str], list[events.Notice]]:
        seen: list[events.Event] = []
        pool: Any = sky.ComputePool(provider=aws(), nodes=1, image=image, name=name, console=False)
        pool.on_event(seen.append)
        with pool:
            assert told() >> pool == (SECRET, "a word of my own files")
            host = hosts.of[cloud.running()[0].id]
            there = host.run(["ls", "/etc/ssh/ssh_host_ed25519_key", "/home/sky/.ssh/authorized_keys"], user="root")
            assert there.returncode == 0, "they are back"
        notices = [event for event in seen if isinstance(event, events.Notice) and event.level == "warning"]
        return [event.phase for event in seen if isinstance(event, events.NodePhase)], notices

    phases, warned = opened("cold")
    assert [notice.text for notice in warned] == []
    assert any(text.startswith("sending packages") for text in phases)
    assert any("keeping the environment" in text for text in phases)
    (id,) = [name for name in cloud.leftovers() if name.startswith("ami-")]

    with tarfile.open(hosts.disk(id)) as disk:
        names = disk.getnames()
        assert any("/envs/" in name and name.endswith("bin/python") for name in names)
        for unwanted in ("ssh_host_", ".ssh/", "/pools/", "includes", "mine.py", "/logs/", "/uv/", "/stage/"):
            inside = [n for n in names if unwanted in n and "/envs/" not in n and "/python/" not in n]
            assert [n for n in inside if not n.endswith("/")] == [], unwanted
        for member in disk:
            content = disk.extractfile(member) if member.isfile() else None
            data = content.read() if content is not None else b""
            assert SECRET.encode() not in data, member.name
            if "/envs/" not in member.name:  # packages may speak of keys
                assert b"PRIVATE KEY-----" not in data, member.name
        machine_id = disk.extractfile("etc/machine-id")
        assert machine_id is not None
        assert machine_id.read() == b""

    listed = command("ps")
    assert f"warm image {id} (available, 50 GB, at most $2.50 a month" in listed

    phases, warned = opened("warm")
    assert [notice.text for notice in warned] == []
    assert [instance.image for instance in cloud.machines.all.values()][-1] == id
    work = ("resolving", "sending", "looking for", "making", "installing", "keeping", "fetching", "checking the host")
    assert [text for text in phases if text.startswith(work)] == [], "nothing is set up"

    assert "would be deleted" in command("down", "--warm")
    assert f"{id}: deleted" in command("down", "--warm", "--yes")
    assert cloud.leftovers() == []
    assert list((state_dir() / "warm").iterdir()) == []
