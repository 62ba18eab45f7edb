"""Choosing among specs: in which order, what another spec may be tried after, and what is told when none is left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward import errors
from skyward.api.provider import Lease, Machine, Offer, Provider
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.machines.acquire import Candidate, Prospect, Selection, look, moves_on, ordered, taken
from skyward.machines.offers import CloudOffer, Plan
from skyward.providers.local import Local

NO_ROOM = errors.NoCapacity("2 nodes", ["2 x g4dn.xlarge (spot, us-east-1a): InsufficientInstanceCapacity"])
NOTHING = errors.NoOffer("2 nodes", "Shop", ["x: too small"])
QUOTA = errors.QuotaExceeded("ec2:RunInstances", "VcpuLimitExceeded", "0 vCPUs", "us-east-1", "quota", "'P instances'")
DENIED = errors.PermissionDenied("ec2:RunInstances", "UnauthorizedOperation", "no", "us-east-1", "permission")
NOBODY = errors.CredentialsMissing("sts:X", "NoCredentials", "none were found", "us-east-1")
DOWN = errors.CloudRefused("ec2:RunInstances", "InternalError", "it broke", "us-east-1", "server")
MISTAKE = errors.CloudRefused("ec2:RunInstances", "InvalidParameterValue", "what?", "us-east-1", "other")
LATE = errors.CloudError("machines did not start within 300 s")
LEFT = errors.NotGivenBack("p", "us-east-1", ["i-1"], 3.0, "The line is down.")
WRONG = errors.InvalidArgument("there is no image ami-1")


@dataclass(frozen=True)
class Shop(Provider):
    """Machines at a price, or the reason why there are none; they are processes of this computer."""

    price: float = 0.0
    fails: Exception | None = None
    unplanned: Exception | None = None
    plans: object = None
    region: str = ""

    @property
    def access(self) -> Access:
        return Access(local=True)

    def offers(self, spec: Spec, count: int) -> Any:
        if self.unplanned is not None:
            raise self.unplanned
        return [Offer("a machine", self.price)] if self.plans is None else self.plans

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Any) -> Lease:
        if self.fails is not None:
            raise self.fails
        return Lease(self, pool, tuple(Machine(f"{pool}-{i}", "127.0.0.1") for i in range(count)))

    def give_back(self, pool: str, report: Any) -> object:
        return f"{pool} given back to {self.region}"


def one(price: float = 0.0, nodes: int = 1, **shop: Any) -> Candidate:
    return Candidate(Shop(price, **shop), Spec(nodes=nodes))


def order(candidates: list[Candidate], selection: Selection) -> list[int]:
    return [candidates.index(prospect.candidate) for prospect in look(candidates, selection).prospects]


def test_the_cheapest_counts_for_all_nodes_together() -> None:
    """D6: selection is first or cheapest; your own machines cost nothing."""
    many, few, own = one(1.0, nodes=8), one(3.0, nodes=2), Candidate(Local(), Spec(nodes=50))
    assert order([many, few, own], "cheapest") == [2, 1, 0]
    assert order([many, few, own], "first") == [0, 1, 2]


def test_what_costs_the_same_is_tried_as_given() -> None:
    assert order([one(2.0, nodes=1), one(1.0, nodes=2), one(2.0, region="b")], "cheapest") == [0, 1, 2]


def test_without_a_price_or_without_an_offer_comes_last() -> None:
    nothing = one(plans=Plan("Shop", "w", 1, ()))
    unknown = one(math.inf)
    refused = one(unplanned=DENIED)
    assert order([nothing, refused, unknown, one(9.0)], "cheapest") == [3, 2, 0, 1]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), min_size=1, max_size=8))
def test_no_spec_is_followed_by_a_cheaper_one(pairs: list[tuple[float, int]]) -> None:
    prospects = [Prospect(one(price, nodes), [Offer("", price)]) for price, nodes in pairs]
    costs = [prospect.hourly_cost for prospect in ordered(prospects, "cheapest")]
    assert costs == sorted(price * nodes for price, nodes in pairs)
    assert list(ordered(prospects, "first")) == prospects


@pytest.mark.parametrize("error", [NO_ROOM, NOTHING, QUOTA, DENIED, NOBODY, DOWN, LATE])
def test_another_spec_may_do_where_this_one_cannot_be_had(error: errors.CloudError) -> None:
    """Rows 44, 46, 56: elsewhere there may be room, a quota, a login."""
    assert moves_on(error)
    told: list[str] = []
    candidates = [one(fails=error), one(region="b")]
    assert taken(candidates, _acquired, told.append).machines
    assert len(told) == 1
    assert str(error) in told[0]
    assert "1 node, spot-if-available, from Shop in b" in told[0]


@pytest.mark.parametrize("error", [MISTAKE, LEFT, WRONG, ValueError("x"), KeyboardInterrupt()])
def test_a_mistake_or_something_left_running_stops_at_once(error: BaseException) -> None:
    """Row 54: machines that are left must be told of, not followed by more of them."""
    assert not moves_on(error)
    asked: list[Candidate] = []

    def acquire(candidate: Candidate) -> None:
        asked.append(candidate)
        raise error

    with pytest.raises(type(error)):
        taken([one(), one()], acquire, _unheard)
    assert len(asked) == 1


@pytest.mark.parametrize("error", [MISTAKE, WRONG])
def test_a_mistake_stops_planning_too(error: Exception) -> None:
    with pytest.raises(type(error)):
        look([one(), one(unplanned=error)], "cheapest")


@pytest.mark.parametrize("error", [NO_ROOM, NOTHING, QUOTA])
def test_the_error_of_a_single_spec_is_its_own(error: errors.CloudError) -> None:
    with pytest.raises(type(error)) as caught:
        taken([one(fails=error)], _acquired, _unheard)
    assert caught.value is error


def test_when_none_is_left_every_reason_is_told() -> None:
    told: list[str] = []
    candidates = [one(nodes=2, fails=NO_ROOM, region="a"), one(fails=QUOTA), one(fails=NOTHING)]
    with pytest.raises(errors.NoneAvailable, match="none of 3 specs is available; nothing was left running") as caught:
        taken(candidates, _acquired, told.append)
    text = str(caught.value)
    assert isinstance(caught.value, errors.NoCapacity)
    assert len(told) == 2
    assert text.index("1. 2 nodes, spot-if-available, from Shop in a") < text.index("2. 1 node") < text.index("3. ")
    assert "InsufficientInstanceCapacity" in text
    assert "'P instances'" in text
    assert "x: too small" in text
    assert "another sky.Spec(...)" in text


def test_plans_say_which_comes_first_and_why() -> None:
    offer = CloudOffer("", 2.0, kind="g4dn.xlarge", zone="us-east-1a", market="spot")
    cloud = one(plans=Plan("AWS in us-east-1", "2 nodes with 1 x T4", 2, (offer,)), nodes=2)
    candidates = [cloud, one(unplanned=NOBODY), one(0.5)]
    plans = look(candidates, "cheapest")
    assert plans.hourly_cost == 0.5
    assert plans.first.candidate is candidates[2]
    text = str(plans)
    assert '3 specs, tried by price, for all nodes together (selection="cheapest")' in text
    assert "1. [$0.5 an hour] 1 node, spot-if-available, from Shop: a machine" in text
    assert "2. [$4.00 an hour] 2 nodes with 1 x T4, from AWS in us-east-1:" in text
    assert "g4dn.xlarge (spot, us-east-1a)" in text
    assert "3. [not available] 1 node, spot-if-available, from Shop: the provider refused sts:X" in text
    assert "in the order in which they are given" in str(look(candidates, "first"))


def _acquired(candidate: Candidate) -> Lease:
    return candidate.provider.acquire(candidate.spec, "p", candidate.nodes, 1.0, _unheard)


def _unheard(text: str) -> None:
    """Nobody listens."""
