from __future__ import annotations

import logging

import pytest

from skyward.client import output
from skyward.node.protocol import Run
from skyward.transport.codec import check


@pytest.mark.parametrize("level", [True, 1 << 80, -(1 << 80), logging.INFO])
def test_any_level_that_python_takes_is_one_that_nodes_take(level: int) -> None:
    logger = logging.getLogger("test_log_levels")
    logger.setLevel(level)
    try:
        header = {"name": "f", "fn": "", "split": 0, "attempt": 0, "log": output.snapshot()}
        check(Run("0" * 12, header, []))  # type: ignore[arg-type] - what a call has
    finally:
        logger.setLevel(logging.NOTSET)
