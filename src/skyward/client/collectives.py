"""Which frames of a stack are those of a collective: a call that returns only when other ranks make it too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skyward.api.stacks import Frame

__all__ = ["Collective", "find"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A wait for other ranks.

    `certain` is False where the same frames also wait for a device that computes: on a machine with accelerators a
    body may stand there for long, use no CPU, and be as busy as can be.
    """

    name: str
    certain: bool


def find(frames: Sequence[Frame]) -> Collective | None:
    """The collective in which a body stands, if its innermost frames are those of one; the outermost frame is first."""
    if not frames:
        return None
    innermost = frames[-1]
    for pattern, name, certain in _KINDS:
        if pattern.search(innermost.file):
            return Collective(name(frames, pattern), certain)
    return None


def _torch(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    """The function that the user has called: the outermost public one."""
    for frame in _inner(frames, pattern):
        if not frame.function.startswith("_") and frame.function not in ("wrapper", "<module>"):
            return f"torch.distributed.{frame.function}"
    return "torch.distributed"


def _ddp(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    return "DistributedDataParallel"


def _backward(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    return "backward, where DistributedDataParallel adds up gradients"


def _jax(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    if any("/keras/" in frame.file for frame in frames):
        methods = [frame.function for frame in frames if frame.file.endswith("/trainer.py")]
        return f"Keras' {methods[0]}(), in JAX" if methods else "Keras, in JAX"
    shared = [frame for frame in frames if "/multihost_utils.py" in frame.file]
    return f"jax.experimental.multihost_utils.{shared[0].function}" if shared else "a computation of JAX"


def _tensorflow(frames: Sequence[Frame], pattern: re.Pattern[str]) -> str:
    return "a computation of TensorFlow"


def _inner(frames: Sequence[Frame], pattern: re.Pattern[str]) -> Sequence[Frame]:
    """The frames at the inner end that are all in files of one kind."""
    at = len(frames)
    while at and pattern.search(frames[at - 1].file):
        at -= 1
    return frames[at:]


_KINDS = (
    (re.compile(r"/torch/distributed/"), _torch, True),
    (re.compile(r"/torch/nn/parallel/distributed\.py$"), _ddp, True),
    (re.compile(r"/jax/experimental/multihost_utils\.py$"), _jax, True),
    (re.compile(r"/torch/(autograd/|_tensor\.py$)"), _backward, False),
    (re.compile(r"/(jax|jaxlib)/"), _jax, False),
    (re.compile(r"/tensorflow/python/"), _tensorflow, False),
)
