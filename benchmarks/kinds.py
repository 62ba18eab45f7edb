"""Things of other kinds than numpy arrays, large and small, measured against an array in the same pool.

torch and jax may live in another environment than the peers of the other groups, as for `ddp`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contest import Medians, Row
from ddp import _python
from timing import timed

__all__ = ["CONTENDERS", "rows"]

MEGABYTES, ROUNDS = 100, 5
KINDS = ("numpy", "torch", "Linear", "state_dict", "jax", "bytes", "bytearray")


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    again = seen("skyward", "numpy again")
    small, array = seen("skyward", "torch small"), seen("skyward", "numpy small")
    return [
        Row("1 kB torch tensor there and back, p50", small, "numpy", array, "ms", at_most=1.15),
        *(
            Row(
                f"{MEGABYTES} MB there and back again: {kind}",
                seen("skyward", f"{kind} again"),
                "numpy",
                again,
                "s",
                at_most=1.3,
            )
            for kind in KINDS[1:]
        ),
    ]


def with_skyward(quick: bool) -> dict[str, float]:
    """All kinds through one pool of one node, in turns; in the interpreter that has torch and jax."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "figures"
        subprocess.run([_python(), __file__, str(into), str(int(quick))], check=True)
        return json.loads(into.read_text())


CONTENDERS = {"skyward": with_skyward}


def echo(value: Any) -> Any:
    """Gives it back."""
    return value


def load() -> None:
    """Imports what the values need, before a clock starts."""
    import jax  # noqa: F401
    import torch  # noqa: F401


def _values(size: int) -> dict[str, Any]:
    import jax.numpy as jnp
    import numpy as np
    import torch

    def data() -> Any:
        return np.random.default_rng().integers(0, 255, size, dtype="u1")

    side = int((size / 4) ** 0.5)
    linear = torch.nn.Linear(side, side, bias=False)
    return {
        "numpy": data(),
        "torch": torch.from_numpy(data()),
        "Linear": linear,
        "state_dict": {"weight": torch.from_numpy(data())},
        "jax": jnp.asarray(data()),
        "bytes": data().tobytes(),
        "bytearray": bytearray(data()),
    }


def _touch(value: Any) -> int:
    """Reads something of every page."""
    import numpy as np

    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        value = value["weight"]
    if isinstance(value, bytes | bytearray):
        value = np.frombuffer(value, "u1")
    return int(np.asarray(value).reshape(-1).view("u1")[::4096].sum())


def _measure(into: Path, quick: bool) -> None:
    import skyward as sky

    seconds: dict[str, list[float]] = {}
    there = sky.compute(echo)
    with sky.ComputePool(nodes=1, console=False) as pool:
        sky.compute(load)() >> pool
        for _ in range(1 if quick else ROUNDS):
            for kind, value in _values((MEGABYTES // 10 if quick else MEGABYTES) * 1_000_000).items():
                for when in ("first", "again", "again"):
                    began = time.perf_counter()
                    _touch(there(value) >> pool)
                    seconds.setdefault(f"{kind} {when}", []).append(time.perf_counter() - began)
        small = {kind: value for kind, value in _values(1_000).items() if kind in ("numpy", "torch")}
        for _ in range(100 if quick else 1_000):  # in turns
            for kind, value in small.items():
                seconds.setdefault(f"{kind} small", []).append(1000 * timed(lambda value=value: there(value) >> pool))
    into.write_text(json.dumps({name: statistics.median(values) for name, values in seconds.items()}))


if __name__ == "__main__":
    _measure(Path(sys.argv[1]), sys.argv[2] == "1")
