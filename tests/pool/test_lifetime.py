"""What holds for the program while pools are open."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from contextlib import ExitStack

from skyward.pool.lifetime import no_core_dumps


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_CORE)[0]


hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
own = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
resource.setrlimit(resource.RLIMIT_CORE, (own, hard))
first, second = ExitStack(), ExitStack()
first.enter_context(no_core_dumps())
second.enter_context(no_core_dumps())
assert limit() == 0
first.close()
assert limit() == 0, "another pool is open"
second.close()
assert limit() == own
with no_core_dumps():
    resource.setrlimit(resource.RLIMIT_CORE, (own // 2, hard))
assert limit() == own // 2, "set by the program itself"
"""


def test_there_are_no_core_dumps_while_a_pool_with_keys_is_open_and_then_as_before() -> None:
    """SEC-15"""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
