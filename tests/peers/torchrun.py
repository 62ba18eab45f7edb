"""The same program under torchrun: two processes on this computer, whose results are read back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["launched", "launched_file"]

_CALL = """
import importlib, os, pickle, sys
module, function, result = sys.argv[1:]
found = getattr(importlib.import_module(module), function)()
with open(f"{result}.{os.environ['RANK']}", "wb") as file:
    pickle.dump(found, file)
"""


def launched(module: str, function: str) -> list[Any]:
    """What a function returns on each of two ranks."""
    import pickle

    with tempfile.TemporaryDirectory() as directory:
        program, result = Path(directory, "program.py"), Path(directory, "result")
        program.write_text(_CALL)
        _torchrun(str(program), module, function, str(result))
        return [pickle.loads(Path(f"{result}.{rank}").read_bytes()) for rank in range(2)]


def launched_file(script: Path, *, agent: bool = True) -> list[Any]:
    """What a program writes with `torch.save` into the file of each rank.

    Without `agent` it is started by hand: a program that names the meeting place itself finds nobody under torchrun.
    """
    import torch

    with tempfile.TemporaryDirectory() as directory:
        result = str(Path(directory, "result"))
        arguments = [str(script), "--result", result, "--snapshot", str(Path(directory, "snapshot.pt"))]
        (_torchrun if agent else _by_hand)(*arguments)
        return [torch.load(f"{result}.{rank}", weights_only=False) for rank in range(2)]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": root, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


def _torchrun(*program: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    subprocess.run(command, env=_environment(), check=True, timeout=300)


def _by_hand(*program: str) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    env = _environment() | {"WORLD_SIZE": "2", "BY_HAND_PORT": port}
    started = [subprocess.Popen([sys.executable, *program], env=env | {"RANK": str(rank)}) for rank in range(2)]
    try:
        statuses = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert statuses == [0, 0], statuses
