"""AWS: giving a pool back until nothing that carries its tag is left, and saying so when it cannot be done."""

from __future__ import annotations

import pickle
import time

import pytest

from skyward import errors
from skyward.api.spec import Spec
from skyward.errors import SkywardError
from skyward.machines.ledger import histories, in_use, pool_dir, remove
from skyward.providers.aws.api import Pace
from tests.support.cloud import Cloud
from tests.support.leases import returned

T4 = Spec(accelerator="T4", nodes=2)
# A group of ours cannot be deleted while a machine stands in it: a net that the ledger must not rely upon.
WITHOUT_GROUP = {"security_group_id": "sg-12345678", "placement_group": False}
IMPATIENT = Pace(base=0.01, cap=0.02, budget=2.0, poll=0.02, settle=0.05, unanswered=0.3)


def nothing_left(cloud: Cloud) -> bool:
    return not cloud.leftovers() and not list(histories())


def test_the_receipt_says_what_was_created_what_is_gone_and_what_it_cost(cloud: Cloud) -> None:
    aws = cloud.aws()
    held = aws.acquire(T4, "p")
    receipt = returned(held, aws)
    assert {bill.id for bill in receipt.machines} == {machine.id for machine in held.machines}
    assert set(receipt.created) == set(receipt.gone)
    assert len(receipt.gone) == 5, "two machines, a group, a key, a placement group"
    assert receipt.total == pytest.approx(2 * 60 * 0.1578 / 3600, rel=0.5), "a minute each is charged at least"
    assert held.pool in str(receipt)
    assert not pool_dir(held.pool).exists()
    assert nothing_left(cloud)


def test_giving_back_twice_is_silent(cloud: Cloud) -> None:
    """Row 55."""
    aws = cloud.aws()
    held = aws.acquire(T4, "p")
    returned(held, aws)
    again = returned(held, aws)
    assert {bill.id for bill in again.machines} == {machine.id for machine in held.machines}
    assert nothing_left(cloud)


def test_slow_machines_are_waited_for_before_the_group_is_deleted(cloud: Cloud) -> None:
    cloud.times.shutdown = 0.4
    aws = cloud.aws()
    held = aws.acquire(T4, "p")
    returned(held, aws)
    assert nothing_left(cloud)


def test_things_that_are_in_use_for_a_while_are_deleted_later(cloud: Cloud) -> None:
    held = cloud.aws().acquire(T4, "p")
    cloud.fail("DeleteSecurityGroup", "DependencyViolation", times=3)
    cloud.fail("DeletePlacementGroup", "InvalidPlacementGroup.InUse", times=2)
    returned(held, cloud.aws())
    assert nothing_left(cloud)


@pytest.mark.parametrize("code", ["InternalError", "RequestLimitExceeded", "Unavailable"])
def test_faults_of_theirs_are_waited_out(cloud: Cloud, code: str) -> None:
    """Row 54."""
    held = cloud.aws().acquire(T4, "p")
    for action in ("TerminateInstances", "DescribeInstances", "DeleteKeyPair", "DeleteSecurityGroup"):
        cloud.fail(action, code, times=3)
    returned(held, cloud.aws())
    assert nothing_left(cloud)


@pytest.mark.parametrize("mode", ["lose", "fail", "cut"])
def test_answers_that_get_lost_do_no_harm(cloud: Cloud, mode: str) -> None:
    held = cloud.aws().acquire(T4, "p")
    for action in ("TerminateInstances", "DeleteKeyPair", "DeletePlacementGroup", "DeleteSecurityGroup"):
        cloud.fail(action, mode=mode)
    returned(held, cloud.aws())
    assert nothing_left(cloud)


@pytest.mark.parametrize(
    ("action", "code", "what"),
    [
        ("TerminateInstances", "InternalError", "i-"),
        ("TerminateInstances", "OperationNotPermitted", "i-"),
        ("TerminateInstances", "UnauthorizedOperation", "i-"),
        ("DescribeInstances", "InternalError", "i-"),
        ("DeleteSecurityGroup", "DependencyViolation", "sg-"),
        ("DeleteSecurityGroup", "UnauthorizedOperation", "sg-"),
        ("DeleteKeyPair", "InternalError", "key-pair skyward-p"),
        ("DeletePlacementGroup", "InvalidPlacementGroup.InUse", "placement-group skyward-p"),
    ],
)
def test_what_cannot_be_given_back_is_named_with_its_price_and_the_command(
    cloud: Cloud, action: str, code: str, what: str
) -> None:
    """Row 54."""
    held = cloud.aws().acquire(T4, "p")
    fault = cloud.fail(action, code, times=-1)
    with pytest.raises(errors.NotGivenBack) as caught:
        returned(held, cloud.aws(pace=IMPATIENT))
    error = caught.value
    text = str(error)
    assert what in text
    assert "us-east-1" in text
    assert f"sky down {held.pool}" in text
    assert code in text or "did not go" in text
    assert error.hourly_cost == pytest.approx(2 * 0.1828 if what == "i-" else 0.0)
    assert str(pickle.loads(pickle.dumps(error))) == text
    assert pool_dir(held.pool).exists(), "the ledger is kept"
    assert not in_use(held.pool), "whoever finishes it can take it over"
    fault.times = 0
    returned(held, cloud.aws())
    assert nothing_left(cloud)


def test_one_machine_that_is_protected_does_not_keep_the_others(cloud: Cloud) -> None:
    """Row 55."""
    held = cloud.aws().acquire(T4, "p")
    stubborn = held.machines[0].id
    cloud.fail("TerminateInstances", "OperationNotPermitted", times=-1, where=lambda c: stubborn in c.params.values())
    with pytest.raises(errors.NotGivenBack) as caught:
        returned(held, cloud.aws(pace=IMPATIENT))
    assert caught.value.ids == (stubborn,)
    assert "OperationNotPermitted" in str(caught.value)
    assert [instance.id for instance in cloud.running()] == [stubborn]
    cloud.faults.clear()
    returned(held, cloud.aws())
    assert nothing_left(cloud)


def test_a_login_that_expires_meanwhile_keeps_the_ledger(cloud: Cloud) -> None:
    """Row 57."""
    held = cloud.aws().acquire(T4, "p")
    cloud.expired = True
    with pytest.raises(errors.NotGivenBack, match="login has expired") as caught:
        returned(held, cloud.aws())
    assert isinstance(caught.value.__cause__, errors.CredentialsExpired)
    assert caught.value.hourly_cost == pytest.approx(2 * 0.1828)
    assert {machine.id for machine in held.machines} <= set(caught.value.ids)
    cloud.expired = False
    returned(held, cloud.aws())
    assert nothing_left(cloud)


def test_an_error_while_opening_whose_undoing_fails_says_what_is_left(cloud: Cloud) -> None:
    cloud.fail("RunInstances", "VcpuLimitExceeded", times=-1)
    cloud.fail("DeleteKeyPair", "UnauthorizedOperation", times=-1)
    with pytest.raises(errors.NotGivenBack, match="key-pair skyward-p") as caught:
        cloud.aws(pace=IMPATIENT).acquire(T4, "p")
    assert isinstance(caught.value.__cause__, errors.QuotaExceeded)


def test_machines_that_have_ended_themselves_are_settled(cloud: Cloud) -> None:
    held = cloud.aws().acquire(T4, "p")
    for machine in held.machines:
        cloud.end(machine.id, "Client.InstanceInitiatedShutdown")
    receipt = returned(held, cloud.aws())
    assert len(receipt.machines) == 2
    assert nothing_left(cloud)


def test_machines_that_aws_has_forgotten_are_settled(cloud: Cloud) -> None:
    """A pool whose machines ended more than an hour ago: AWS does not list them any more."""
    held = cloud.aws(pace=IMPATIENT).acquire(T4, "p")
    for machine in held.machines:
        cloud.end(machine.id)
        cloud.machines.all[machine.id].visible_at = time.time() + 10_000
    returned(held, cloud.aws(pace=IMPATIENT))
    assert nothing_left(cloud)


def test_tags_alone_are_enough(cloud: Cloud) -> None:
    """Row 58: the ledger is lost."""
    held = cloud.aws().acquire(T4, "p")
    held.let_go()
    remove(held.pool)
    receipt = returned(held, cloud.aws())
    assert len(receipt.machines) == 2
    assert receipt.total > 0, "the price is in a tag as well"
    assert nothing_left(cloud)


def test_a_torn_ledger_is_made_up_for_by_tags(cloud: Cloud) -> None:
    """Row 58: cut at every line, and in the middle of the line before it."""
    for lines in range(10):
        held = cloud.aws().acquire(T4, "p")
        held.let_go()
        path = pool_dir(held.pool) / "ledger"
        content = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(content[:lines]) + (content[lines][:20] if lines < len(content) else b""))
        returned(held, cloud.aws())
        assert nothing_left(cloud), lines


def test_a_machine_that_appears_after_an_empty_listing_is_ended(cloud: Cloud) -> None:
    """Row 47: without an answer on record, listings must stay empty for a while."""
    cloud.times.visible = 0.4
    cloud.fail("RunInstances", mode="lose", times=-1)
    pace = Pace(base=0.01, cap=0.02, budget=1.0, poll=0.02, settle=0.1, unanswered=1.0)
    with pytest.raises(errors.CloudRefused):
        cloud.aws(pace=pace, **WITHOUT_GROUP).acquire(T4, "p")
    assert len(cloud.machines.all) == 2
    assert nothing_left(cloud)


def test_a_machine_of_which_only_the_id_is_known_is_waited_for_and_ended(cloud: Cloud) -> None:
    """Row 47: AWS has answered with ids, but lists nothing yet."""
    cloud.times.visible = 0.5
    with pytest.raises(SkywardError, match="not shown"):
        cloud.aws(**WITHOUT_GROUP).acquire(T4, "p", timeout=0.01)
    assert len(cloud.machines.all) == 2
    assert nothing_left(cloud)


def test_other_pools_are_not_touched(cloud: Cloud) -> None:
    """Row 39."""
    first, second = cloud.aws().acquire(T4, "p"), cloud.aws().acquire(T4, "q")
    returned(first, cloud.aws())
    assert {instance.id for instance in cloud.running()} == {machine.id for machine in second.machines}
    returned(second, cloud.aws())
    assert nothing_left(cloud)


def test_listing_takes_as_many_calls_for_many_machines_as_for_few(cloud: Cloud) -> None:
    """N25."""
    counts: list[int] = []
    cloud.aws().offers(Spec())  # what is asked once a process is asked
    for nodes in (1, 40):
        cloud.calls.clear()
        held = cloud.aws().acquire(Spec(nodes=nodes), "p")
        returned(held, cloud.aws())
        counts.append(len(cloud.calls))
    assert counts[0] == counts[1]
