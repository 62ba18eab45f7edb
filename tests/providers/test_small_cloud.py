"""A provider on the cloud kit, as an installed package: examples/extensions/small_cloud.py against its emulated API."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.machines.cloud import LEASE_FILE, OWNER, POOL
from skyward.machines.ledger import pool_dir
from skyward.testing import ProviderContract
from tests.support.leases import quiet
from tests.support.packages import install
from tests.support.small_cloud import TOKEN, SmallCloud

PAGE = "write-a-provider.md"
POINTS = {"skyward.providers": {"Nimbus": "small_cloud:Nimbus"}}


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallCloud]:
    (tmp_path / "package").mkdir()
    install("small_cloud", PAGE, tmp_path / "package", monkeypatch, POINTS)
    monkeypatch.delitem(sys.modules, "small_cloud", raising=False)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    with SmallCloud() as cloud:
        monkeypatch.setenv("NIMBUS_URL", cloud.url)
        monkeypatch.setenv("NIMBUS_TOKEN", TOKEN)
        yield cloud


@pytest.fixture
def provider(cloud: SmallCloud) -> Any:
    from small_cloud import Nimbus

    return Nimbus(poll=0.02, patience=20.0, settle=0.2)


class TestNimbus(ProviderContract):
    @pytest.fixture
    def provider(self, cloud: SmallCloud, provider: Any) -> Iterator[sky.Provider]:
        yield provider
        assert cloud.listed("servers") == cloud.listed("keys") == []


def acquire(provider: Any, count: int = 1) -> Any:
    return provider.acquire(sky.Spec(), "p", count, 20.0, lambda text: None)


def test_a_server_has_the_pool_s_key_and_labels_and_ends_itself(cloud: SmallCloud, provider: Any) -> None:
    held = acquire(provider)
    (machine,) = held.machines
    (server,), (key,) = cloud.listed("servers"), cloud.listed("keys")
    directory = pool_dir("p")
    assert machine.ssh.host == server["ip"]
    assert machine.ssh.key == str(directory / "id_ed25519")
    assert key["public_key"] == (directory / "id_ed25519.pub").read_text().strip()
    assert (directory / "known_hosts").read_text().startswith(f"{server['ip']} ssh-ed25519 ")
    for thing in (server, key):
        assert (thing["labels"][POOL], thing["labels"][OWNER]) == ("p", "account-7")
    assert server["user_data"].startswith("#cloud-config")
    assert f"touch {LEASE_FILE}" in server["user_data"]
    assert provider.access.lease_file == LEASE_FILE
    held.close(quiet)
    assert not directory.exists()


@pytest.mark.parametrize("action", ["POST keys", "POST servers"])
@pytest.mark.parametrize("mode", ["lose", "fail", "cut", "refuse"])
def test_a_call_without_an_answer_makes_one_thing(cloud: SmallCloud, provider: Any, action: str, mode: Any) -> None:
    cloud.fail(action, mode=mode)
    held = acquire(provider)
    assert [server["id"] for server in cloud.listed("servers")] == [held.machines[0].id]
    assert len(cloud.listed("keys")) == 1
    held.close(quiet)
    assert cloud.listed("servers") == cloud.listed("keys") == []


def test_what_a_call_that_is_never_answered_made_is_given_back(cloud: SmallCloud, provider: Any) -> None:
    cloud.fail("POST servers", mode="fail", times=1)
    cloud.fail("POST servers", mode="refuse", times=-1)
    with pytest.raises(sky.errors.CloudRefused, match="POST servers"):
        acquire(provider)
    assert cloud.listed("servers") == cloud.listed("keys") == []
    assert not pool_dir("p").exists()


def test_another_type_is_taken_where_there_is_no_room(cloud: SmallCloud, provider: Any) -> None:
    cloud.room["small"] = 1
    held = acquire(provider, 2)
    assert sorted(server["type"] for server in cloud.listed("servers")) == ["medium", "small"]
    held.close(quiet)
    cloud.room = dict.fromkeys(cloud.room, 1)
    with pytest.raises(sky.errors.NoCapacity):
        acquire(provider, 4)
    assert cloud.listed("servers") == cloud.listed("keys") == []


def test_what_only_carries_the_pool_s_label_is_left_alone(cloud: SmallCloud, provider: Any) -> None:
    held = acquire(provider)
    (mine,) = cloud.listed("servers")
    labels = mine["labels"]
    cloud.answer("POST", "servers", {}, {"name": "hers", "type": "small", "key": "her-key", "labels": labels})
    (hers,) = [server for server in cloud.listed("servers") if server["name"] == "hers"]
    assert {item.id: bool(item.foreign) for item in provider.find() if item.kind == "machine"} == {
        mine["id"]: False,
        hers["id"]: True,
    }
    receipt = held.close(quiet)
    assert [server["id"] for server in cloud.listed("servers")] == [hers["id"]]
    assert f"{hers['id']} carries the tag of pool p" in receipt.remarks[0]


def test_the_receipt_has_the_whole_price_of_every_machine(cloud: SmallCloud, provider: Any) -> None:
    held = acquire(provider)
    (first,) = held.machines
    (second,) = held.more(sky.Spec(), 1, 20.0, quiet)
    held.terminate([first])
    assert (pool_dir("p") / "known_hosts").read_text().startswith(f"{second.ssh.host} ")
    while first.id in [server["id"] for server in cloud.listed("servers")]:
        time.sleep(0.01)
    receipt = held.close(quiet)
    assert {bill.id for bill in receipt.machines} == {first.id, second.id}
    assert {bill.hourly.record()["disk"] for bill in receipt.machines} == {0.005}
    assert receipt.total == pytest.approx(sum(bill.seconds * 0.026 / 3600 for bill in receipt.machines))
    assert len(receipt.created) == 3
    (charged,) = {charge.provider for charge in receipt.charges()}
    assert charged == "Nimbus"


def test_a_wrong_token_is_refused_before_anything_is_created(cloud: SmallCloud, provider: Any) -> None:
    from small_cloud import Nimbus

    with pytest.raises(sky.errors.CloudRefused, match="who are you"):
        acquire(Nimbus(token="another"))
    assert "another" not in repr(Nimbus(token="another"))
    assert [json.loads(call.params["body"]) for call in cloud.calls] == []
