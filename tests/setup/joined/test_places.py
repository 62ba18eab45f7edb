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
