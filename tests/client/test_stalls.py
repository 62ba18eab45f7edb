"""Whether ranks wait for each other for ever, and what is said about it: from what was seen, without any process."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.api.stacks import Frame, Stack
from skyward.client import collectives, stalls
from skyward.client.stalls import Rank

USER = Frame("/home/me/train.py", 31, "train")
TORCH = (
    USER,
    Frame("/env/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper"),
    Frame("/env/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
)
BACKWARD = (
    USER,
    Frame("/env/site-packages/torch/_tensor.py", 630, "backward"),
    Frame("/env/site-packages/torch/autograd/graph.py", 829, "_engine_run_backward"),
)
DDP = (USER, Frame("/env/site-packages/torch/nn/parallel/distributed.py", 1, "forward"))
KERAS = (
    USER,
    Frame("/env/site-packages/keras/src/utils/traceback_utils.py", 117, "error_handler"),
    Frame("/env/site-packages/keras/src/backend/jax/trainer.py", 462, "fit"),
    Frame("/env/site-packages/jax/_src/interpreters/pxla.py", 395, "__call__"),
)
GATHER = (USER, Frame("/env/site-packages/jax/experimental/multihost_utils.py", 159, "process_allgather"))
SLEEP = (USER, Frame("/home/me/data.py", 7, "download"))
LOADER = (USER, Frame("/env/site-packages/torch/utils/data/dataloader.py", 1, "__next__"))


def rank(number: int, frames: tuple[Frame, ...] | None = None, **known: Any) -> Rank:
    stack = None if frames is None else Stack(number, number, "running", "c", "train", frames=frames)
    return Rank(number, number, stack=stack, **{"cpu": 0.0, **known})


def returned(number: int, **known: Any) -> Rank:
    return Rank(number, number, returned=True, **known)


@pytest.mark.parametrize(
    ("frames", "name", "certain"),
    [
        (TORCH, "torch.distributed.all_reduce", True),
        (DDP, "DistributedDataParallel", True),
        (BACKWARD, "backward, where DistributedDataParallel adds up gradients", False),
        (KERAS, "Keras' fit(), in JAX", False),
        (GATHER, "jax.experimental.multihost_utils.process_allgather", True),
    ],
)
def test_a_collective_is_known_by_the_innermost_frame(frames: Any, name: str, certain: bool) -> None:
    assert collectives.find(frames) == collectives.Collective(name, certain)


@pytest.mark.parametrize("frames", [SLEEP, LOADER, (USER,), (), (*TORCH, USER)])
def test_other_frames_are_no_collective(frames: Any) -> None:
    assert collectives.find(frames) is None


@pytest.mark.parametrize(
    ("ranks", "finding"),
    [
        ([returned(0), returned(1)], "going on"),
        ([returned(1), rank(0, TORCH)], "stuck"),
        ([rank(0, TORCH), rank(1, TORCH)], "stuck"),
        ([rank(0, KERAS), rank(1, GATHER)], "stuck"),
        ([rank(0, TORCH)], "stuck"),
        # somebody computes, or may do so
        ([returned(1), rank(0, TORCH, cpu=0.5)], "going on"),
        ([returned(1), rank(0, TORCH, cpu=None)], "going on"),
        ([returned(1), rank(0, TORCH, entered=True)], "going on"),
        ([rank(0, TORCH), rank(1, SLEEP, cpu=0.9)], "going on"),
        ([rank(0, TORCH), rank(1, None)], "going on"),
        # a rank that is not in a collective may still come
        ([rank(0, TORCH), rank(1, SLEEP)], "going on"),
        ([rank(0, SLEEP), rank(1, SLEEP)], "going on"),
        ([returned(0), rank(1, SLEEP)], "alone"),
        ([returned(0), rank(1, TORCH), rank(2, SLEEP)], "alone"),
        # on a GPU, a computation of JAX looks like a wait; a collective of torch does not
        ([returned(1), rank(0, KERAS, accelerators=True)], "alone"),
        ([rank(0, KERAS, accelerators=True), rank(1, KERAS, accelerators=True)], "going on"),
        ([returned(1), rank(0, TORCH, accelerators=True)], "stuck"),
    ],
)
def test_a_broadcast_is_stuck_only_if_nobody_can_go_on(ranks: list[Rank], finding: str) -> None:
    assert stalls.judge(ranks) == finding


def test_the_sentence_says_who_returned_where_the_others_stand_and_why() -> None:
    ranks = [
        rank(0, TORCH, collectives=5, shard=(129, 2, 65)),
        returned(1, collectives=4, shard=(129, 2, 64)),
    ]
    assert stalls.sentence("train", ranks) == (
        "train: rank 1 has returned, rank 0 stands in torch.distributed.all_reduce (/home/me/train.py:31) without "
        "using CPU. Ranks have made different numbers of steps, so that some wait for others that never come. "
        "Rank 0 has entered 5 collectives, rank 1 4. sky.shard gave rank 0 65, rank 1 64 of 129 elements; "
        "sky.shard(..., drop_last=True) or pad=True makes parts equal."
    )


def test_what_is_not_known_is_not_said() -> None:
    text = stalls.sentence("train", [rank(0, TORCH, collectives=5), returned(1)])
    assert "entered" not in text
    assert "shard" not in text


def test_ranks_that_wait_at_different_places_are_told_so() -> None:
    text = stalls.sentence("train", [rank(0, KERAS), rank(1, GATHER)])
    assert "They wait at different places" in text
    assert "returned" not in text


def test_many_ranks_at_one_place_are_named_together() -> None:
    text = stalls.sentence("train", [*(rank(number, TORCH) for number in range(12)), returned(12)])
    assert "rank 12 has returned, ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more stand in" in text


def test_a_call_to_one_node_is_told_to_be_sent_to_all() -> None:
    assert "Send it to all with `call() @ pool`" in stalls.sentence("train", [rank(1, TORCH)])


def test_where_every_rank_stood_reads_like_a_traceback() -> None:
    text = str(stalls.stacks([rank(0, TORCH), returned(1), rank(2, None)]))
    assert text.splitlines() == [
        "rank 0 (node 0): train, running, 0.0 s, 0.0 s CPU (call c)",
        "    /home/me/train.py:31 in train",
        "    torch/distributed/c10d_logger.py:83 in wrapper",
        "    torch/distributed/distributed_c10d.py:3252 in all_reduce",
        "rank 1 (node 1): returned",
        "rank 2 (node 2): running",
        "    no stack: its node did not answer",
    ]
