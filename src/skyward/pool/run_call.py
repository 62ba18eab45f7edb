"""The program of `sky.detach`: runs a function while its pool is open, and keeps what it returns or raises.

stdin: the function, its arguments and its pool's options --main--> <folder>/results/return.pkl, raised
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import SkywardError
from skyward.node.processes import die_with_parent
from skyward.node.run_folder import FOLDER, RAISED, RETURNED
from skyward.transport import exceptions
from skyward.transport.payload import Packer, unpack

__all__ = ["Call", "main", "packed", "raised"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FITS_RESERVE = 8 << 20  # beside the last lines of output and the journal's


@dataclass(frozen=True)
class Call:
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pool: dict[str, Any]


def packed(call: Call, folders: Sequence[str]) -> bytes:
    """For standard input: first the folders of modules, which the rest may need."""
    head, buffers = Packer(folders).pack(call, "the function of a detached run")
    return pickle.dumps((list(folders), bytes(head), [bytes(buffer) for buffer in buffers]))


def raised(content: bytes) -> BaseException:
    """What the function raised, with its traceback."""
    head, _, data = content.partition(b"\n")
    described: Any = json.loads(head)
    error = exceptions.rebuild(described, data)
    return exceptions.annotate(error, described, "the function of this detached run raised")


def main() -> None:
    die_with_parent(os.getppid())
    folders, head, buffers = pickle.loads(sys.stdin.buffer.read())
    sys.path += [path for path in map(os.path.abspath, folders) if path not in sys.path]
    if _file(RETURNED).exists():
        return  # by an earlier start, whose process failed when it ended
    _file(RAISED).unlink(missing_ok=True)
    call: Call = unpack(head, buffers)
    from skyward.pool.pool import ComputePool

    options = dict(call.pool)
    try:
        with ComputePool(*options.pop("specs"), **options):
            value = call.fn(*call.args, **call.kwargs)
        _keep(RETURNED, _pickled(value))
    except SystemExit as exc:
        _keep_error(SkywardError(f"the function called sys.exit({exc.code!r}), so it returned nothing."))
        raise
    except Exception as exc:
        _keep_error(exc)
        raise


def _pickled(value: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as exc:
        text = f"the function returned a {type(value).__name__} that cannot be pickled: {exc}"
        raise SkywardError(text) from exc


def _keep_error(exc: Exception) -> None:
    described, data = exceptions.capture(exc)
    _keep(RAISED, json.dumps(described).encode() + b"\n" + data)


def _keep(name: str, content: bytes) -> None:
    """On disk and renamed before anybody is told. A full disk has room for small content."""
    try:
        try:
            _write(name, content)
        except OSError as exc:
            if exc.errno not in _NO_ROOM or len(content) > _FITS_RESERVE:
                raise
            _file("reserve").unlink(missing_ok=True)
            _write(name, content)
    except OSError as exc:
        text = f"the disk of {_file('')} does not take the {len(content) / 1e6:,.1f} MB that the function returned: "
        raise SkywardError(f"{text}{exc.strerror}. Have the function write large results to a file.") from exc


def _write(name: str, content: bytes) -> None:
    part = _file(name).with_suffix(".part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.rename(_file(name))


def _file(name: str) -> Path:
    return Path(os.environ[FOLDER], name)


if __name__ == "__main__":
    from skyward.pool.run_call import main as run  # so that `Call` has one class

    run()
