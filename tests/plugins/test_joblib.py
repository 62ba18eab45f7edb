"""What joblib's batches do on a node that lacks a module, and which package brings it."""

from __future__ import annotations

import pytest

from skyward.plugins import _joblib
from skyward.plugins._joblib import Lacking, packages_with, runs

HEAD = b"\x80\x05c" + b"nowhere\nthing\n."


def test_a_batch_that_needs_a_module_is_not_run_and_says_which() -> None:
    tasks = _joblib._tasks(1, None, (), HEAD)
    assert tasks == Lacking("nowhere")
    assert runs("body")(tasks) == Lacking("nowhere")


def test_a_batch_for_which_nothing_can_be_added_raises_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        _joblib._tasks(1, None, None, HEAD)


def test_a_module_is_brought_by_the_package_of_this_computer() -> None:
    assert packages_with("nowhere") == []
    assert packages_with("numpy")[0].startswith("numpy==")
    assert packages_with("tests") == []
