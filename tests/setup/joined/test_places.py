"""Who may take which place of a pool."""

from __future__ import annotations

import pytest

from skyward.node.join import token
from skyward.setup.joined.places import Places, Refused

POOL, SECRET = "pool", "ab" * 32


def proof(place: int | None, secret: str = SECRET, pool: str = POOL) -> str:
    return token(secret, pool, place)


@pytest.fixture
def places() -> Places:
    made = Places(POOL, SECRET)
    made.open([0, 1])
    return made


def test_a_place_is_bound_to_the_first_key_that_comes_with_its_token(places: Places) -> None:
    """SEC-34."""
    assert places.admit(1, proof(1), "first") == 1
    assert places.admit(1, proof(1), "first") == 1  # its answer was lost, or its connection
    with pytest.raises(Refused, match="taken by another machine") as refused:
        places.admit(1, proof(1), "second")
    assert refused.value.known


def test_who_does_not_know_the_secret_is_refused_and_nobody_is_bothered_with_it(places: Places) -> None:
    """SEC-34."""
    for wrong in (proof(0, "cd" * 32), proof(1), proof(0, pool="other"), "", "nonsense"):
        with pytest.raises(Refused) as refused:
            places.admit(0, wrong, "key")
        assert not refused.value.known


def test_a_token_is_good_for_its_own_place_only(places: Places) -> None:
    """SEC-34."""
    with pytest.raises(Refused):
        places.admit(1, proof(0), "key")


def test_machines_without_a_number_get_the_places_that_are_free(places: Places) -> None:
    assert places.admit(None, proof(None), "one") == 0
    assert places.admit(None, proof(None), "two") == 1
    assert places.admit(None, proof(None), "one") == 0
    assert places.admit(0, proof(0), "one") == 0  # it knows its number by now
    with pytest.raises(Refused, match="every place is taken"):
        places.admit(None, proof(None), "three")


def test_places_lapse_with_the_time_to_take_them(places: Places) -> None:
    """SEC-34."""
    places.admit(0, proof(0), "key")
    places.close([0, 1])
    assert places.admit(0, proof(0), "key") == 0
    for place in (1, 7):
        with pytest.raises(Refused, match="the time to take it is over"):
            places.admit(place, proof(place), "late")


def test_a_place_that_was_given_up_is_not_taken_again_by_who_had_it(places: Places) -> None:
    places.admit(0, proof(0), "key")
    places.retire(0)
    with pytest.raises(Refused, match="given up"):
        places.admit(0, proof(0), "key")
    places.open([0])
    assert places.admit(0, proof(0), "another") == 0


def test_who_is_started_again_for_a_machine_that_is_absent_gets_a_place_once_there_is_one(places: Places) -> None:
    """Engines do so, with the same number: Kubernetes has JOB_COMPLETION_INDEX. SEC-34."""
    places.admit(0, proof(0), "other")
    places.admit(1, proof(1), "first")
    places.use([0, 1])
    with pytest.raises(Refused, match="taken by another machine") as refused:
        places.admit(1, proof(1), "second", away={})
    assert refused.value.known
    with pytest.raises(Refused, match="every place is taken") as refused:
        places.admit(1, proof(1), "second", away={1: 5})
    assert (refused.value.instead_of, refused.value.again, refused.value.known) == (None, True, False), "it may be back"
    with pytest.raises(Refused, match="given up") as refused:
        places.admit(1, proof(1), "second", away={1: 60})
    assert (refused.value.instead_of, refused.value.again) == (1, True)
    places.retire(1)
    with pytest.raises(Refused, match="every place is taken") as refused:
        places.admit(1, proof(1), "second", away={0: 60, 1: 60})
    assert (refused.value.instead_of, refused.value.again, refused.value.known) == (None, True, False)
    places.open([2])
    assert places.admit(1, proof(1), "second", away={1: 60}) == 2
    assert places.admit(2, proof(2), "second", away={1: 60}) == 2  # it has been told its number
    with pytest.raises(Refused, match="given up"):
        places.admit(1, proof(1), "first", away={1: 60})


@pytest.mark.parametrize("number", [None, 1])
def test_nobody_has_more_than_one_machine_given_up(places: Places, number: int | None) -> None:
    for place in (0, 1):
        places.admit(place, proof(place), f"machine {place}")
    places.use([0, 1])
    given_up: list[int | None] = []
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            places.admit(number, proof(number), "another", away={0: 60, 1: 60})
        given_up.append(refused.value.instead_of)
    assert given_up == [number or 0, None, None]


def test_an_absent_machine_loses_its_place_to_the_next_one_if_the_pool_has_not_used_it(places: Places) -> None:
    places.admit(1, proof(1), "first")
    assert places.admit(1, proof(1), "first", away={1: 60}) == 1
    places.admit(0, proof(0), "other")
    assert places.admit(1, proof(1), "second", away={1: 60}) == 1
    with pytest.raises(Refused, match="taken by another machine"):
        places.admit(1, proof(1), "first", away={})


def test_who_comes_late_gets_any_place_that_is_open_where_machines_are_interchangeable(places: Places) -> None:
    places.admit(0, proof(0), "key")
    assert places.admit(7, proof(7), "late", away={}) == 1
    with pytest.raises(Refused, match="every place is taken") as refused:
        places.admit(8, proof(8), "later", away={})
    assert refused.value.known
    with pytest.raises(Refused, match="secret"):
        places.admit(1, proof(0), "stranger", away={0: 60, 1: 60})
