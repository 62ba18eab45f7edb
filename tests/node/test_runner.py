"""What a runner tells its agent; its threads and bodies are tested with real processes."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from skyward.node.protocol import Run, RunnerToAgent
from skyward.node.runner import Runner


@pytest.mark.parametrize("leaving", [False, True])
def test_a_call_that_comes_when_no_body_begins_any_more_goes_back_at_once(leaving: bool) -> None:
    """Bodies that run beside it may take hours, so the agent must not wait for the end of the process."""
    ours, theirs = socket.socketpair()
    status = os.open(os.devnull, os.O_RDWR)
    try:
        runner: Any = Runner(ours, status)
        sent: list[Any] = []
        runner._send = sent.append
        if leaving:
            runner._calls.leave()
        runner._run(Run("c", {"name": "f", "fn": "", "split": 0, "attempt": 0}, []))
        assert sent == ([RunnerToAgent.Recalled("c")] if leaving else [])
        assert runner._queue.empty() == leaving
    finally:
        os.close(status)
        ours.close()
        theirs.close()
