"""The plugin of docs/guides/write-a-plugin.md, as a package that was installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from tests.support.packages import block, install

PAGE = "write-a-plugin.md"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("workdir", PAGE, tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "workdir", raising=False)


def test_the_program_of_the_page_runs_and_leaves_nothing() -> None:
    program = block(PAGE, "python", "with sky.ComputePool").replace("nodes=2", "nodes=2, console=False")
    page: dict[str, Any] = {"__name__": "__main__"}
    exec(program, page)
    assert page["first"] != page["second"]
    assert not Path(page["first"]).exists()


def test_a_disk_without_room_ends_the_opening_with_the_plugins_words() -> None:
    pool = sky.ComputePool(plugins=[sky.plugins.workdir(keep_free_gb=1e6)], console=False)
    with pytest.raises(sky.errors.PluginError, match=r"workdir.*bootstrap.*[\s\S]*KB are free"), pool:
        pass


def test_a_plugin_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"no plugin 'wordkir'; there are .*torch.*workdir"):
        _ = sky.plugins.wordkir
    assert not hasattr(sky.plugins, "__wrapped__")
