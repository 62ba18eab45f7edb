"""Finding and ending what is left of pools, from ledgers and from tags alone."""

from __future__ import annotations

import os
import socket
import time

import pytest

from skyward import errors
from skyward.api.provider import Lease
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.machines.ledger import Ledger, pool_dir, remove
from skyward.machines.reaper import Found, chosen, down, expired_leftovers, mentioned, pools
from tests.support.cloud import Cloud
from tests.support.leases import returned

T4 = Spec(accelerator="T4", nodes=2, ttl=3600)


def abandon(held: Lease) -> None:
    """As if the process had died."""
    held.let_go()


def lose_ledger(held: Lease) -> None:
    """As if the pool had been opened on another computer."""
    held.let_go()
    remove(held.pool)


def test_pools_are_listed_with_their_machines_price_and_condition(cloud: Cloud) -> None:
    used = cloud.aws().acquire(T4, "used")
    dead = cloud.aws().acquire(T4, "dead")
    far = cloud.aws().acquire(T4, "far")
    abandon(dead)
    lose_ledger(far)
    found = {item.pool: item for item in pools([cloud.aws()])}
    assert {name: item.condition for name, item in found.items()} == {
        used.pool: "in use",
        dead.pool: "abandoned",
        far.pool: "elsewhere",
    }
    for item in found.values():
        kinds = [leftover.kind for leftover in item.leftovers]
        assert kinds.count("machine") == 2
        assert {"security-group", "key-pair", "placement-group", "volume"} <= set(kinds)
        assert item.hourly_cost == pytest.approx(2 * 0.1828)
        assert item.pool in str(item)
    assert found[used.pool].pid is not None
    returned(far, cloud.aws())


def test_nothing_is_ended_unless_it_is_told_twice(cloud: Cloud) -> None:
    """SEC-32: a dry run by default."""
    held = cloud.aws().acquire(T4, "p")
    abandon(held)
    (outcome,) = down([cloud.aws()], [held.pool])
    assert outcome.did == "would end"
    assert len(cloud.running()) == 2
    (outcome,) = down([cloud.aws()], [held.pool], really=True)
    assert outcome.did == "ended"
    assert outcome.receipt is not None
    assert len(outcome.receipt.machines) == 2
    assert cloud.leftovers() == []
    assert pools([cloud.aws()]) == []


def test_a_pool_in_use_is_left_alone_even_when_it_is_named_or_expired(cloud: Cloud) -> None:
    """Row 59."""
    held = cloud.aws().acquire(Spec(nodes=1, ttl=0.001), "p")
    time.sleep(0.01)
    for how in ({"names": [held.pool]}, {"everything": True}, {"expired": True}):
        (outcome,) = down([cloud.aws()], **how, really=True)  # type: ignore[arg-type]
        assert outcome.did == "left alone"
        assert "in use by process" in outcome.why
    assert len(cloud.running()) == 1


def test_all_means_what_is_abandoned_or_expired_but_not_what_may_be_in_use_elsewhere(cloud: Cloud) -> None:
    """Row 59."""
    dead, far = cloud.aws().acquire(T4, "dead"), cloud.aws().acquire(T4, "far")
    abandon(dead)
    lose_ledger(far)
    outcomes = {item.found.pool: item.did for item in down([cloud.aws()], everything=True, really=True)}
    assert outcomes == {dead.pool: "ended", far.pool: "left alone"}
    assert {instance.id for instance in cloud.running()} == {machine.id for machine in far.machines}
    (outcome,) = down([cloud.aws()], [far.pool], really=True)
    assert outcome.did == "ended"
    assert cloud.leftovers() == []


def test_what_a_detached_run_has_is_ended_by_name_alone_until_its_time_is_over(cloud: Cloud) -> None:
    held, over = cloud.aws().acquire(T4, "held"), cloud.aws().acquire(T4, "over")
    held.hand_over("grid", time.time() + 100)
    over.hand_over("old", time.time() - 1)
    assert mentioned([item for item in expired_leftovers(cloud.aws()) if item.pool == held.pool]) is None
    outcomes = {item.found.pool: item for item in down([cloud.aws()], everything=True, really=True)}
    assert (outcomes[held.pool].found.condition, outcomes[held.pool].did) == ("detached", "left alone")
    assert "`sky stop`" in outcomes[held.pool].why
    assert outcomes[over.pool].did == "ended"
    (outcome,) = down([cloud.aws()], [held.pool], really=True)
    assert outcome.did == "ended"
    assert cloud.leftovers() == []


def test_a_pool_of_another_computer_with_the_same_home_is_ended_only_by_name(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 59: each may have its own locks there (NFS with nolock, Lustre with localflock)."""
    with monkeypatch.context() as other:
        other.setattr(socket, "gethostname", lambda: "login2.cluster")
        held = cloud.aws().acquire(T4, "p")
    abandon(held)
    (outcome,) = down([cloud.aws()], everything=True, really=True)
    assert (outcome.found.condition, outcome.did) == ("elsewhere", "left alone")
    assert outcome.why.startswith(f"may be in use by process {os.getpid()} on login2.cluster")
    assert mentioned(expired_leftovers(cloud.aws())) is None
    assert len(cloud.running()) == 2
    (outcome,) = down([cloud.aws()], [held.pool], really=True)
    assert outcome.did == "ended"
    assert cloud.leftovers() == []


def test_expired_means_by_the_tag_wherever_the_pool_was_opened(cloud: Cloud) -> None:
    """SEC-32."""
    old, young = cloud.aws().acquire(Spec(ttl=0.001), "old"), cloud.aws().acquire(Spec(ttl=3600), "young")
    lose_ledger(old)
    lose_ledger(young)
    while not down([cloud.aws()], expired=True):  # the tag counts in seconds
        time.sleep(0.05)
    outcomes = down([cloud.aws()], expired=True, really=True)
    assert [item.found.pool for item in outcomes] == [old.pool]
    assert {instance.id for instance in cloud.running()} == {machine.id for machine in young.machines}
    returned(young, cloud.aws())


def test_pools_of_other_owners_are_not_seen(cloud: Cloud) -> None:
    """Row 59."""
    other = cloud.aws(owner="somebody else").acquire(T4, "theirs")
    lose_ledger(other)
    assert pools([cloud.aws()]) == []
    assert [item.pool for item in pools([cloud.aws(owner="somebody else")])] == [other.pool]
    returned(other, cloud.aws(owner="somebody else"))
    assert cloud.leftovers() == []


def test_ledgers_lead_to_other_regions(cloud: Cloud) -> None:
    held = cloud.aws(region="eu-west-1").acquire(T4, "p")
    abandon(held)
    (found,) = pools([cloud.aws()])
    assert (found.region, sum(item.kind == "machine" for item in found.leftovers)) == ("eu-west-1", 2)
    down([cloud.aws()], everything=True, really=True)
    assert cloud.leftovers() == []


def test_regions_can_be_named_where_there_is_no_ledger(cloud: Cloud) -> None:
    held = cloud.aws(region="eu-west-1").acquire(T4, "p")
    lose_ledger(held)
    assert pools([cloud.aws()]) == []
    assert [item.pool for item in pools([cloud.aws()], regions=["eu-west-1"])] == [held.pool]
    down([cloud.aws()], [held.pool], really=True, regions=["eu-west-1"])
    assert cloud.leftovers() == []


def test_a_ledger_without_anything_left_is_cleared_away(cloud: Cloud) -> None:
    ledger = Ledger.start("empty", {"provider": "AWS", "region": "us-east-1", "endpoint_url": cloud.endpoint})
    ledger.let_go()
    (outcome,) = down([cloud.aws()], everything=True, really=True)
    assert outcome.did == "ended"
    assert not pool_dir("empty").exists()


def test_keys_without_a_ledger_are_removed_with_the_pool(cloud: Cloud) -> None:
    """Row 58: only the ledger file was deleted."""
    held = cloud.aws().acquire(T4, "p")
    abandon(held)
    (pool_dir(held.pool) / "ledger").unlink()
    down([cloud.aws()], [held.pool], really=True)
    assert cloud.leftovers() == []
    assert not pool_dir(held.pool).exists()


def test_a_place_that_cannot_be_asked_hides_no_other(
    cloud: Cloud, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"provider": "AWS", "region": "us-west-2", "endpoint_url": f"http://127.0.0.1:{unused_tcp_port}"}
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", gone["endpoint_url"])
    Ledger.start("unreachable", gone).let_go()
    held = cloud.aws().acquire(T4, "p")
    aws = cloud.aws(pace=cloud.aws().pace.__class__(budget=0.1, base=0.01, poll=0.02))
    found = {item.pool: item for item in pools([aws])}
    assert set(found) == {"unreachable", held.pool}
    assert "us-west-2" in found["unreachable"].trouble
    assert found["unreachable"].condition == "abandoned"
    Ledger.resume("unreachable").remove()  # type: ignore[union-attr]


def test_one_that_fails_does_not_stop_the_rest(cloud: Cloud) -> None:
    first, second = cloud.aws().acquire(T4, "a"), cloud.aws().acquire(T4, "b")
    abandon(first)
    abandon(second)
    bad = first.machines[0].id
    cloud.fail("TerminateInstances", "UnauthorizedOperation", times=-1, where=lambda c: bad in c.params.values())
    outcomes = {item.found.pool: item for item in down([cloud.aws()], everything=True, really=True)}
    assert outcomes[first.pool].did == "failed"
    assert f"sky down {first.pool}" in outcomes[first.pool].why
    assert outcomes[second.pool].did == "ended"


def test_opening_a_pool_can_mention_what_is_left(cloud: Cloud) -> None:
    held = cloud.aws().acquire(T4, "p")
    assert expired_leftovers(cloud.aws()) == []
    abandon(held)
    assert [item.pool for item in expired_leftovers(cloud.aws())] == [held.pool]


def test_a_ledger_of_which_nothing_is_left_is_not_mentioned(cloud: Cloud) -> None:
    held = cloud.aws().acquire(T4, "p")
    left = (pool_dir(held.pool) / "ledger").read_bytes()
    returned(held, cloud.aws())
    pool_dir(held.pool).mkdir(mode=0o700)
    (pool_dir(held.pool) / "ledger").write_bytes(left)  # as after a client that did not learn that all had ended
    assert mentioned(expired_leftovers(cloud.aws())) is None
    assert [item.did for item in down([cloud.aws()], [held.pool], really=True)] == ["ended"]


def test_a_reaper_that_meets_another_one_leaves_the_pool_to_it(cloud: Cloud) -> None:
    """Row 59."""
    held = cloud.aws().acquire(T4, "p")
    abandon(held)
    other = Ledger.resume(held.pool)
    assert other is not None
    (outcome,) = down([cloud.aws()], [held.pool], really=True)
    assert outcome.did == "left alone"
    other.let_go()


def test_nothing_said_and_unknown_names_are_refused(cloud: Cloud) -> None:
    with pytest.raises(InvalidArgument, match="--all or --expired"):
        chosen([])
    with pytest.raises(InvalidArgument, match="no pool nothing is open on this computer or has left anything behind"):
        down([cloud.aws()], ["nothing"])
    one = Found("p", "r", "abandoned", cloud.aws())
    assert chosen([one], names=["p"]) == [(one, "")]


def test_without_a_login_the_reaper_says_so(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 56."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(errors.CredentialsMissing):
        pools([cloud.aws()])
    with pytest.raises(errors.CredentialsMissing):
        down([cloud.aws()], everything=True)
    with pytest.raises(InvalidArgument, match=r"no pool lab is known on this computer .* no AWS login that works"):
        down([cloud.aws()], ["lab"])


@pytest.fixture
def unused_tcp_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
