"""Things that all tests of a folder share, and that end with its last test: pytest's own scopes know no folders.

    _shared, pytest_runtest_teardown = shared_by(Path(__file__).parent)

in the folder's conftest.py; fixtures of the scope "session" then enter what is to end with the folder into `_shared`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

__all__ = ["shared_by"]


def shared_by(folder: Path) -> tuple[ExitStack, Callable[..., Any]]:
    """A stack that is closed after the last test of a folder, and the hook that does so."""
    shared = ExitStack()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            if nextitem is None or not nextitem.path.is_relative_to(folder):
                shared.close()

    return shared, pytest_runtest_teardown
