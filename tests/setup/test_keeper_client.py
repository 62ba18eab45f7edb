"""What a keeper says that is not a message fails the start of its machine, and nothing else (SEC-7)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import BootstrapError
from skyward.node.orders import ClientToKeeper
from skyward.setup.keeper_client import KeeperClient
from tests.support.waiting import until


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
    "not JSON": "print('nonsense', flush=True)",
    "not a list": "print('{}', flush=True)",
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
        started.ask(ClientToKeeper.Look(), time.monotonic() + 300)
    assert time.monotonic() - began < 120


def test_why_a_keeper_has_ended_is_known_where_it_can_be(keeper: Callable[[str], KeeperClient]) -> None:
    alive = keeper("import sys\nsys.stdin.read()")
    assert alive.ended(3600.0) == ""
    killed = keeper("import os\nos.kill(os.getpid(), 9)")
    until(lambda: killed.ended(3600.0) == "the pool's first process on h0 was killed by signal 9")
    over = keeper("""print('["over", 0]', flush=True)""")
    until(lambda: over.ended(3600.0) == "the pool's ttl of 3600 s is over")


def test_a_time_to_live_that_ends_while_the_pool_opens_is_named(keeper: Callable[[str], KeeperClient]) -> None:
    started = keeper("""print('["over", 0]', flush=True)""")
    with pytest.raises(BootstrapError, match="ttl was over before it was open"):
        started.start([{}], False, time.monotonic() + 300)


def test_a_keeper_that_cannot_begin_says_why_where_no_file_can_be_written(
    keeper: Callable[[str], KeeperClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))  # as good as a full disk
    started = keeper("raise OSError('No space left on device')")
    with pytest.raises(BootstrapError, match="No space left on device"):
        started.start([{}], False, time.monotonic() + 300)
