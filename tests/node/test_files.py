"""What an agent says of the files of its node fits into the frames that the client takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from skyward.node import files
from skyward.node.files import NodeFiles


def test_a_list_of_files_comes_in_pages_that_are_short_also_where_names_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PAGE_CHARACTERS", 500)
    names = {f"{number}-{'n' * 200}" for number in range(10)}
    for name in names:
        (tmp_path / name).touch()
    scan = NodeFiles(cast("Any", None), lambda: None, lambda message: None)._scan
    pages = [answer["entries"] for answer, _ in scan({"do": "scan", "path": str(tmp_path)})]
    assert {entry[0] for page in pages for entry in page} == {"", *names}
    assert max(sum(len(entry[0]) for entry in page) for page in pages) < 1000
