"""Whether ranks wait for each other for ever, and what is said about it: from what was seen, without any process."""

from __future__ import annotations

import re
from typing import Any

import pytest

from skyward.api.stacks import Frame, Stack
from skyward.client import stalls
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
CHECKPOINT = (
    USER,
    Frame("/env/site-packages/torch/distributed/checkpoint/logger.py", 87, "wrapper"),
    Frame("/env/site-packages/torch/distributed/checkpoint/filesystem.py", 386, "_write_files_from_queue"),
)
TF_DATA = (
    USER,
    Frame("/env/site-packages/tensorflow/python/data/ops/iterator_ops.py", 773, "_next_internal"),
    Frame("/env/site-packages/tensorflow/python/ops/gen_dataset_ops.py", 3086, "iterator_get_next"),
)


def stack(*lines: str) -> tuple[Frame, ...]:
    """Frames as `file:line in function`, a file of a package from there on, and one of Python with its directory."""
    found: list[Frame] = []
    for line in lines:
        file, number, function = re.fullmatch(r"(.+):(\d+) in (.+)", line).groups()  # type: ignore[union-attr]
        found.append(Frame(file if file.startswith("/") else f"/env/site-packages/{file}", int(number), function))
    return tuple(found)


# As they were seen in runs with Keras 3.15 on JAX 0.10 and with torch 2.13, under Python 3.11.
LIB = "/usr/lib/python3.11"
THREAD = (f"{LIB}/threading.py:1002 in _bootstrap", f"{LIB}/threading.py:982 in run")
POOLED = (*THREAD, f"{LIB}/concurrent/futures/thread.py:83 in _worker", f"{LIB}/concurrent/futures/thread.py:58 in run")
FLUSH = stack(  # rank 0 of an uneven fit: Keras has its callbacks called by a thread
    "/home/me/train.py:12 in train",
    "keras/src/utils/traceback_utils.py:117 in error_handler",
    "keras/src/backend/jax/trainer.py:526 in fit",
    "keras/src/callbacks/callback_list.py:167 in on_epoch_end",
    "keras/src/callbacks/callback_list.py:152 in _flush_futures",
    f"{LIB}/concurrent/futures/_base.py:451 in result",
    f"{LIB}/threading.py:327 in wait",
)
CALLBACK = stack(  # that thread
    *POOLED,
    "keras/src/callbacks/callback_list.py:218 in _on_train_batch_end",
    "keras/src/utils/python_utils.py:189 in pythonify_logs",
    "keras/src/backend/jax/core.py:409 in convert_to_numpy",
)
RESET = stack(  # rank 1 of the same fit
    "/home/me/train.py:12 in train",
    "keras/src/backend/jax/trainer.py:441 in fit",
    "keras/src/trainers/trainer.py:312 in reset_metrics",
    "keras/src/backend/jax/distribution_lib.py:83 in distribute_tensor",
    "jax/_src/api.py:2118 in device_put",
    "jax/_src/dispatch.py:509 in _device_put_sharding_impl",
    "jax/experimental/multihost_utils.py:179 in assert_equal",
    "jax/experimental/multihost_utils.py:159 in process_allgather",
    "jax/_src/tree_util.py:399 in tree_map",
    "jax/experimental/multihost_utils.py:134 in _handle_array_process_allgather",
)
FUNCTIONAL = stack(  # as FSDP2 and DTensor wait
    "/home/me/train.py:11 in train",
    "torch/distributed/_functional_collectives.py:1155 in __torch_dispatch__",
    "torch/utils/_cxx_pytree.py:692 in wrapped",
    "torch/distributed/_functional_collectives.py:1143 in unwrap",
    "torch/distributed/_functional_collectives.py:1115 in trigger_wait",
    "torch/distributed/_functional_collectives.py:142 in wait_tensor",
    "torch/_ops.py:1279 in __call__",
)
IDLE = stack(*THREAD, f"{LIB}/concurrent/futures/thread.py:81 in _worker")
REDUCER = stack(*POOLED, "/home/me/train.py:40 in average", "torch/distributed/distributed_c10d.py:3252 in all_reduce")
WRITER = stack(*THREAD, "wandb/sdk/writer.py:9 in run", f"{LIB}/queue.py:171 in get", f"{LIB}/threading.py:327 in wait")
QUEUE = stack(
    "/home/me/train.py:20 in train",
    "torch/utils/data/dataloader.py:1270 in _try_get_data",
    f"{LIB}/queue.py:180 in get",
    f"{LIB}/threading.py:331 in wait",
)
PIN_MEMORY = stack(
    *THREAD,
    "torch/utils/data/_utils/pin_memory.py:57 in _pin_memory_loop",
    f"{LIB}/multiprocessing/queues.py:113 in get",
    f"{LIB}/selectors.py:415 in select",
)
UPLOAD = stack(*POOLED, "boto3/s3/inject.py:640 in upload_fileobj", f"{LIB}/ssl.py:1166 in read")
OPERATION = stack("/home/me/train.py:20 in train", "torch/_ops.py:1279 in __call__")
HEARTBEAT = stack(*THREAD, "/home/me/train.py:5 in beat")
LOGGED = stack(  # a callback of the user's, called by Keras' thread
    *POOLED,
    "keras/src/callbacks/callback_list.py:218 in _on_train_batch_end",
    "wandb/integration/keras/callbacks/metrics_logger.py:131 in on_batch_end",
    f"{LIB}/ssl.py:1166 in read",
)
AWAITED = stack(
    "/home/me/train.py:20 in train",
    f"{LIB}/concurrent/futures/_base.py:451 in result",
    f"{LIB}/threading.py:327 in wait",
)
IN_C = stack(*THREAD)  # a thread whose function is written in C, and has no frame
TF_THREAD = (*stack(*THREAD), *TF_DATA[1:])


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
        (FUNCTIONAL, "torch.distributed.wait_tensor", True),
        (BACKWARD, "backward, where DistributedDataParallel adds up gradients", False),
        (KERAS, "Keras' fit(), in JAX", False),
        (GATHER, "jax.experimental.multihost_utils.process_allgather", True),
    ],
)
def test_a_collective_is_known_by_the_innermost_frame(frames: Any, name: str, certain: bool) -> None:
    assert stalls.find(frames) == stalls.Collective(name, certain)


@pytest.mark.parametrize(
    ("frames", "helpers", "name"),
    [
        (FLUSH, [CALLBACK], "Keras' fit(), in JAX"),
        (FLUSH, [CALLBACK, IDLE, WRITER], "Keras' fit(), in JAX"),
        (RESET, [IDLE], "Keras' fit(), in JAX"),
        (QUEUE, [REDUCER], "torch.distributed.all_reduce"),
        # no thread is in a collective
        (FLUSH, [], None),
        (FLUSH, [IDLE, WRITER], None),
        (QUEUE, [PIN_MEMORY], None),
        # Keras waits for threads of its own, whatever those of others do
        (FLUSH, [CALLBACK, UPLOAD], "Keras' fit(), in JAX"),
        (FLUSH, [CALLBACK, HEARTBEAT, IN_C, TF_THREAD], "Keras' fit(), in JAX"),
        (FLUSH, [CALLBACK, LOGGED], None),
        # one is, but another does something, and the body may wait for that one
        (FLUSH, [REDUCER, UPLOAD], None),
        (QUEUE, [REDUCER, PIN_MEMORY], None),
        (QUEUE, [REDUCER, HEARTBEAT], None),
        (FLUSH, [REDUCER, IN_C], None),
        (FLUSH, [REDUCER, TF_THREAD], None),
        (AWAITED, [REDUCER, HEARTBEAT], None),
        (AWAITED, [REDUCER], "torch.distributed.all_reduce"),
        # the body does not wait for a thread: what other threads do says nothing about it
        (SLEEP, [CALLBACK, REDUCER], None),
        (LOADER, [REDUCER], None),
        (stack("/home/me/train.py:9 in train", f"{LIB}/ssl.py:1166 in read"), [REDUCER], None),
        (stack("/home/me/train.py:9 in train", "/home/me/queue.py:3 in get"), [REDUCER], None),
    ],
)
def test_a_body_that_waits_for_a_thread_stands_where_the_thread_does(frames: Any, helpers: Any, name: Any) -> None:
    """S3-22: Keras on JAX waits for a thread of its own."""
    found = stalls.find(frames, helpers)
    assert (found and found.name) == name


@pytest.mark.parametrize("frames", [SLEEP, LOADER, CHECKPOINT, TF_DATA, QUEUE, OPERATION, (USER,), (), (*TORCH, USER)])
def test_other_frames_are_no_collective(frames: Any) -> None:
    assert stalls.find(frames) is None


@pytest.mark.parametrize(
    ("ranks", "finding"),
    [
        ([returned(0), returned(1)], "going on"),
        ([returned(1), rank(0, TORCH)], "stuck"),
        ([rank(0, TORCH), rank(1, TORCH)], "stuck"),
        ([rank(0, KERAS), rank(1, GATHER)], "stuck"),
        ([rank(0, TORCH)], "stuck"),
        ([rank(0, FLUSH, helpers=(CALLBACK,)), rank(1, RESET, helpers=(IDLE,))], "stuck"),
        # somebody computes, or may do so
        ([returned(1), rank(0, TORCH, cpu=0.5)], "going on"),
        ([returned(1), rank(0, TORCH, cpu=None)], "going on"),
        ([returned(1), rank(0, TORCH, entered=True)], "going on"),
        ([rank(0, TORCH), rank(1, SLEEP, cpu=0.9)], "going on"),
        ([rank(0, TORCH), rank(1, None)], "going on"),
        # a rank that is not in a collective may still come
        ([rank(0, TORCH), rank(1, SLEEP)], "going on"),
        ([rank(0, SLEEP), rank(1, SLEEP)], "going on"),
        ([rank(0, FLUSH, helpers=(CALLBACK, LOGGED)), rank(1, RESET)], "going on"),
        ([rank(0, FLUSH, helpers=(CALLBACK,)), rank(1, RESET, cpu=0.7)], "going on"),
        ([rank(0, FLUSH, helpers=(CALLBACK,), accelerators=True), rank(1, RESET, accelerators=True)], "going on"),
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


def test_the_line_that_is_named_is_the_users_and_not_one_of_python() -> None:
    text = stalls.sentence("train", [rank(0, FLUSH, helpers=(CALLBACK,)), rank(1, RESET)])
    assert "ranks 0, 1 stand in Keras' fit(), in JAX (/home/me/train.py:12) without using CPU" in text


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
