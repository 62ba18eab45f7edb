"""The provider of docs/guides/write-a-provider.md, as an installed package: its tests, a real pool, `sky ps`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.testing import ProviderContract
from tests.support.hosts import HostSpec, Network, unavailable
from tests.support.packages import block, install

PAGE = "write-a-provider.md"


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    install("lab", PAGE, tmp_path_factory.mktemp("package"), monkeypatch)
    monkeypatch.delitem(sys.modules, "lab", raising=False)


class TestLab(ProviderContract):
    """The page's own tests; what its fixture says is run as it stands there."""

    @pytest.fixture
    def provider(self, tmp_path_factory: pytest.TempPathFactory) -> sky.Provider:
        page: dict[str, Any] = {}
        exec(block(PAGE, "python", "class TestLab"), page)
        made: Callable[..., sky.Provider] = page["TestLab"].provider.__wrapped__
        return made(None, tmp_path_factory.mktemp("inventory"))


def test_a_machine_that_somebody_else_has_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab import Lab

    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    for name in ("ada", "grace"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"host": name}))
    lab = Lab(str(tmp_path))
    first = lab.acquire(sky.Spec(), "first", 1, 1.0, print)
    with pytest.raises(sky.errors.NoCapacity, match="only 1 are free"):
        lab.acquire(sky.Spec(), "second", 2, 1.0, print)
    assert [(item.pool, item.id) for item in lab.find()] == [("first", first.machines[0].id)]
    first.close(print)


def test_sky_ps_and_sky_down_know_it_although_another_provider_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("LAB_INVENTORY", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    (tmp_path / "ada.json").write_text(json.dumps({"host": "ada"}))
    program = "import skyward as sky, lab, os; lab.Lab().acquire(sky.Spec(), 'killed', 1, 1.0, print); os._exit(9)"
    subprocess.run([sys.executable, "-c", program], check=False, timeout=180)
    assert (tmp_path / "ada.taken").exists()

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-P", "-m", "skyward", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)

    listed = command("ps")
    assert re.search(r"^killed +abandoned +Lab +1 ", listed.stdout, re.M)
    assert "ada" in listed.stdout
    assert listed.stderr == "", "nobody has used AWS here, or named it"
    named = command("ps", "--region", "eu-west-1")
    assert "AWS could not be asked what is left there" in named.stderr
    assert re.search(r"^killed +abandoned +Lab +1 ", named.stdout, re.M)
    would = json.loads(command("down", "killed", "--json").stdout)
    assert (would["kind"], would["pool"], would["provider"]) == ("pool", "killed", "Lab")
    assert (would["did"], would["why"], would["receipt"]) == ("would end", "", None)
    ended = command("down", "killed", "--yes", "--if-there")
    assert (ended.returncode, ended.stdout) == (0, "killed: ended\nmachines given back: ada\n"), ended.stderr
    assert not (tmp_path / "ada.taken").exists()


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
def test_a_pool_on_its_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab import Lab

    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "client"))
    cache, inventory = tmp_path / "cache", tmp_path / "inventory"
    cache.mkdir()
    inventory.mkdir()
    spec = HostSpec(share={"/run/skyward": cache}, setenv={"SKYWARD_CACHE": "/run/skyward"})
    with Network([spec] * 3, internet=True) as net:
        for host in net:
            target = {"host": host.address, "user": "sky", "key": str(net.key), "known_hosts": str(net.known_hosts)}
            (inventory / f"{host.name}.json").write_text(json.dumps(target))

        with sky.ComputePool(provider=Lab(str(inventory)), nodes=2, console=False) as pool:
            hosts = sky.compute(socket.gethostname)() @ pool
            assert len(set(hosts)) == 2
            assert len(list(inventory.glob("*.taken"))) == 2
    assert list(inventory.glob("*.taken")) == []
    assert "machines given back" in str(pool.receipt)
