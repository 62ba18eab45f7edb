"""What a keeper says that is no message fails the start of its machine, and nothing else (SEC-7)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from skyward.errors import BootstrapError
from skyward.node.orders import ClientToKeeper
from skyward.setup.keeper_client import KeeperClient


class Shell:
    """Starts a program of the test in the keeper's place."""

    name = "h0"

    def __init__(self, program: str) -> None:
        self._program = program

    def start(self, argv: Sequence[str], env: Mapping[str, str], errors: Any) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", self._program]
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )


@pytest.fixture
def keeper() -> Iterator[Callable[[str], KeeperClient]]:
    made: list[KeeperClient] = []

    def start(program: str) -> KeeperClient:
        made.append(KeeperClient(Shell(program), "python", {}, "/nowhere", 0.0, 0.0))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for each in made:
        each.end(0.0)


SAYS = {
    "no JSON": "print('nonsense', flush=True)",
    "no list": "print('{}', flush=True)",
    "an empty list": "print('[]', flush=True)",
    "deep": "print('[' * 100_000, flush=True)",
    "a line without end": "import sys; sys.stdout.write('[' + '1' * (4 << 20)); sys.stdout.flush()",
    "bad UTF-8": "import os; os.write(1, b'\\xff\\xfe\\n')",
    "an unknown kind": "print('[\"explode\", 0]', flush=True)",
    "wrong types": 'print(\'["addresses", "x", 0]\', flush=True)',
    "more answers than orders": 'print(\'["listening", "x", 0]\\n\' * 20_000, flush=True)',
}


@pytest.mark.parametrize("program", SAYS.values(), ids=SAYS.keys())
def test_what_is_no_answer_is_an_error_of_starting(keeper: Callable[[str], KeeperClient], program: str) -> None:
    started = keeper(f"import sys\n{program}\nsys.stdin.read()")
    began = time.monotonic()
    with pytest.raises(BootstrapError):
        started.ask(ClientToKeeper.look(), time.monotonic() + 300)
    assert time.monotonic() - began < 120
