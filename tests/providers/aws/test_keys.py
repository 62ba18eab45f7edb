"""AWS: the key by which a machine is known at first, where it cannot be replaced in time."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from skyward.api.shell import Finished, Shell, SshTarget
from skyward.machines.cloud import make_keys, replace_host_key, trust


class Stuck:
    """A machine on which no command comes to its end."""

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        raise subprocess.TimeoutExpired(list(argv), timeout)


def test_a_machine_that_is_too_slow_to_replace_its_host_key_is_told_in_words(tmp_path: Path) -> None:
    """SEC-5: what is trusted stays what was trusted, and the user knows."""
    keys = make_keys(tmp_path)
    trust(keys, ["10.0.0.1"])
    before = keys.known_hosts.read_text()
    target = SshTarget("10.0.0.1", known_hosts=str(keys.known_hosts))
    said: Any = replace_host_key(cast("Shell", Stuck()), target, timeout=3)
    assert said.startswith("machines keep the host key of their user data")
    assert said.endswith("it did not do so within 3 s. Open the pool again if that matters to you.")
    assert keys.known_hosts.read_text() == before
