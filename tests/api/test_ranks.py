"""Which rank runs on which node."""

from __future__ import annotations

from skyward.api.spec import Ranks


def test_ranks_are_counted_up_node_by_node() -> None:
    ranks = Ranks([2, 1, 3])
    assert len(ranks) == 6
    assert ranks.places == ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2))
    assert [ranks.rank(*place) for place in ranks.places] == list(range(6))
    assert [list(ranks.on(node)) for node in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert ranks.many


def test_with_one_process_a_node_the_rank_is_the_node() -> None:
    ranks = Ranks([1, 1, 1])
    assert ranks.places == ((0, 0), (1, 0), (2, 0))
    assert not ranks.many
