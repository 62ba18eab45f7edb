"""What Slurm takes from a ledger: where the login node is, and never a command (SEC-21)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.api.provider import Leftover
from skyward.api.shell import SshTarget
from skyward.errors import InvalidArgument, SkywardError
from skyward.machines.ledger import Ledger, Record, line, parsed
from skyward.machines.reaper import pools
from skyward.providers.slurm.provider import _login_record

TARGET = SshTarget("login.example.org", "ada", 2222, "/home/ada/.ssh/key", "accept-new", "/home/ada/known")
GOOD = _login_record(TARGET)


def test_a_login_node_is_found_again_by_its_ledger() -> None:
    assert sky.Slurm().reopened({"login": GOOD}).login == TARGET
    assert sky.Slurm().reopened({"login": None}) == sky.Slurm()
    old = {**GOOD, "proxy": None, "proxy_logins": []}
    assert sky.Slurm().reopened({"login": old}).login == TARGET, "as earlier versions wrote it"


def test_no_command_is_taken_from_a_ledger() -> None:
    """SEC-21: `sky ps` ran the proxy that a forged ledger named; that attack worked."""
    for forged in ({**GOOD, "proxy": "id > /dev/null"}, _login_record(SshTarget("x", proxy="nc %h %p"))):
        with pytest.raises(InvalidArgument, match="proxy command"):
            sky.Slurm().reopened({"login": forged})
    assert "nc" not in str(_login_record(SshTarget("x", proxy="nc %h %p")))


WRONG: list[Any] = [
    *("text", 5, [1], {}, True, {"host": "x"}),
    *({**GOOD, "host": host} for host in (None, 5, "", "-oProxyCommand=id", "a b", "a;b", "a\n")),
    *({**GOOD, "user": user} for user in ("-l", ["a"], "")),
    *({**GOOD, "port": port} for port in ("22", True, 70000, 0)),
    *({**GOOD, "host_keys": keys} for keys in ("no", [], None)),
    *({**GOOD, name: value} for name, value in (("key", {}), ("config", None), ("known_hosts", 1))),
]


@pytest.mark.parametrize("login", WRONG, ids=str)
def test_a_login_that_we_did_not_write_is_refused(login: Any) -> None:
    """SEC-21."""
    with pytest.raises(InvalidArgument, match="names no login node"):
        sky.Slurm().reopened({"login": login})


@pytest.mark.parametrize(
    "address", [5, None, {}, "", "5", "auto", "head:6379", "file:///etc/passwd", "http://a\nb"], ids=repr
)
def test_an_address_of_ray_that_we_did_not_write_is_refused(address: Any) -> None:
    """SEC-21: `sky ps` took it for a cluster that has nothing left, without a word."""
    with pytest.raises(InvalidArgument, match="names no Jobs API"):
        sky.Ray().reopened({"address": address})
    assert sky.Ray().reopened({"address": "http://head:8265"}) == sky.Ray("http://head:8265", token="")


class Elsewhere(sky.Slurm):
    """A cluster that has nothing, and that fails in its own ways."""

    def find(self) -> list[Leftover]:
        return []

    def reopened(self, metadata: Any) -> sky.Slurm:
        if metadata.get("name") == "odd":
            raise KeyError("proxy_logins")
        return super().reopened(metadata)


@pytest.fixture
def ledgers() -> Iterator[None]:
    """Two forged ones, and one as it should be."""
    told = {"provider": "Elsewhere", "expires": time.time() - 5}
    for pool, more in (("forged", {"login": "text"}), ("odd", {"name": "odd"}), ("good", {"login": None})):
        Ledger.start(pool, {**told, **more}).let_go()
    yield
    for pool in ("forged", "odd", "good"):
        if ledger := Ledger.resume(pool):
            ledger.remove()


def test_a_ledger_that_cannot_be_used_hides_no_other_pool(ledgers: None) -> None:
    """SEC-21: any error in reading one ended `sky ps` with a traceback."""
    found = {item.pool: item.trouble for item in pools([Elsewhere()])}
    assert "names no login node" in found["forged"]
    assert "cannot be used" in found["odd"]
    assert found["good"] == ""


SENSELESS: list[Any] = [None, "", "x", "\x1b", 5, -1, True, [], [1], {}, {"a": 1}, {"host": []}, 1e400, "x" * 5000]


@pytest.mark.parametrize("provider", [sky.Slurm(), sky.Ray(), sky.AWS(owner="me")], ids=lambda each: each.name)
def test_no_value_in_a_ledger_raises_another_error_than_ours(provider: Any) -> None:
    """SEC-21: also one that passes for text or a number, and means nothing."""
    for name in ("login", "address", "pool", "pace", "owner", "region", "profile", "endpoint_url", "token", "name"):
        for value in SENSELESS:
            record = parsed(line(Record("open", data={"owner": "me", name: value})))
            if record is None:
                continue  # it is not even read
            try:
                hash(provider.reopened(record.data))
            except SkywardError:
                continue
            except Exception as exc:
                raise AssertionError(f"{name}={value!r}: {exc!r}") from exc
