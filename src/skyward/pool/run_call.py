"""The program of `sky.detach`: runs a function while its pool is open, and keeps what it returns or raises.

stdin: the function, its arguments and its pool's options --main--> <folder>/results/return
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import SkywardError
from skyward.node.processes import die_with_parent
from skyward.node.run_folder import FOLDER, RESULTS
from skyward.transport import exceptions

__all__ = ["Call", "main", "outcome", "packed"]

_FILE = f"{RESULTS}/return"


@dataclass(frozen=True)
class Call:
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pool: dict[str, Any]
    """What `ComputePool` was given."""


def packed(call: Call) -> bytes:
    """For standard input: where modules are found first, then the rest, which may need them."""
    import cloudpickle

    return pickle.dumps((list(sys.path), cloudpickle.dumps(call)))


def outcome(content: bytes) -> Any:
    """What the function returned; its exception is raised, with the traceback that it had there."""
    head, _, data = content.partition(b"\n")
    about: Any = json.loads(head)
    if about["outcome"] == "returned":
        return pickle.loads(data)
    error = exceptions.rebuild(about["error"], data)
    raise exceptions.annotate(error, about["error"], "the function of this detached run raised")


def main() -> None:
    die_with_parent(os.getppid())
    paths, data = pickle.loads(sys.stdin.buffer.read())
    sys.path += [path for path in paths if path not in sys.path]
    call: Call = pickle.loads(data)
    from skyward.pool.pool import ComputePool

    options = dict(call.pool)
    try:
        with ComputePool(*options.pop("specs"), **options):
            value = call.fn(*call.args, **call.kwargs)
    except Exception as exc:
        error, data = exceptions.capture(exc)
        _keep({"outcome": "raised", "error": error}, data)
        raise
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as exc:
        failure = SkywardError(f"the function returned a {type(value).__name__} that cannot be pickled: {exc}")
        error, data = exceptions.capture(failure)
        _keep({"outcome": "raised", "error": error}, data)
        raise failure from exc
    _keep({"outcome": "returned"}, data)


def _keep(about: Any, data: bytes | memoryview) -> None:
    """Written, on disk and renamed before anybody is told."""
    path = Path(os.environ[FOLDER], _FILE)
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(json.dumps({**about, "time": time.time()}).encode() + b"\n")
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


if __name__ == "__main__":
    from skyward.pool.run_call import main as run  # so that `Call` has one class

    run()
