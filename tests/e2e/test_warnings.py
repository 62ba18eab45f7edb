"""Warnings of bodies: as the client would show its own, by its filters, once, and from which nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.client.output import Watch, snapshot
from skyward.events import Warned
from skyward.node.logs import parsed
from skyward.node.settings import MARK
from skyward.view.console import WarningLines
from tests.support.waiting import until


class Rough(UserWarning):
    """A category that only this program has."""


@sky.compute
def warn(text: str = "careful", kind: Any = UserWarning) -> int:
    warnings.warn(text, kind, stacklevel=1)
    return sky.instance_info().node


@pytest.fixture
def shown() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def test_a_warning_arrives_as_the_client_would_show_its_own(
    pool: sky.ComputePool, shown: list[warnings.WarningMessage]
) -> None:
    node = warn("two\nlines", Rough) >> pool
    until(lambda: shown)
    [found] = shown
    assert found.category is Rough
    assert str(found.message) == "two\nlines"
    assert found.filename == __file__
    assert found.line == "warnings.warn(text, kind, stacklevel=1)"
    assert found.message.node == node  # type: ignore[union-attr]


def test_a_warning_that_the_client_ignores_is_not_given(
    pool: sky.ComputePool, shown: list[warnings.WarningMessage]
) -> None:
    heard: list[Warned] = []
    stop = pool.on_event(lambda event: isinstance(event, Warned) and heard.append(event))
    warnings.filterwarnings("ignore", category=Rough)
    warnings.filterwarnings("ignore", message="not this", category=UserWarning)
    warn("any", Rough) @ pool
    warn("NOT THIS one") @ pool
    warn("but this") >> pool
    until(lambda: heard)
    stop()
    assert [event.text for event in heard] == ["but this"]
    assert [str(found.message) for found in shown] == ["but this"]


def test_a_warning_that_is_an_error_here_is_one_there(pool: sky.ComputePool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="careful"):
            warn() >> pool
        with pytest.raises(Rough):
            warn("rough", Rough) >> pool
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert warn() >> pool in (0, 1), "and no longer when it is none here"


def test_what_packages_warn_of_is_shown_where_all_warnings_are_errors(pool: sky.ComputePool, tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "some_package.py"
    package.parent.mkdir()
    package.write_text("import warnings\ndef old():\n    warnings.warn('old', DeprecationWarning)\n    return 1\n")

    @sky.compute
    def use() -> int:
        space: dict[str, Any] = {"__name__": "some_package"}
        exec(compile(package.read_text(), str(package), "exec"), space)
        return sum(space["old"]() for _ in range(3))

    heard: list[Warned] = []
    stop = pool.on_event(lambda event: isinstance(event, Warned) and heard.append(event))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use() >> pool == 3
        until(lambda: heard)
        stop()
        assert [(event.category, event.text) for event in heard] == [("DeprecationWarning", "old")]
        warnings.filterwarnings("error", category=DeprecationWarning)
        with pytest.raises(DeprecationWarning, match="old"):
            use() >> pool


def test_captured_warnings_are_records(pool: sky.ComputePool) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("py.warnings")
    log.addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        try:
            warn("captured") >> pool
            until(lambda: records)
        finally:
            logging.captureWarnings(False)
            log.removeHandler(handler)
    [record] = records
    assert record.levelname == "WARNING"
    assert "test_warnings.py" in record.getMessage()
    assert "UserWarning: captured\n  warnings.warn(" in record.getMessage()
    assert record.processName.startswith("node-")


def test_a_body_that_records_warnings_itself_is_left_alone(
    pool: sky.ComputePool, shown: list[warnings.WarningMessage]
) -> None:
    @sky.compute
    def record() -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.warn("mine", stacklevel=1)
        return [str(one.message) for one in found]

    assert record() >> pool == ["mine"]
    assert not shown


def test_redirected_output_has_the_warning_as_text(pool: sky.ComputePool) -> None:
    @sky.compute
    def captured() -> str:
        import io

        with contextlib.redirect_stderr(io.StringIO()) as out:
            warnings.warn("to the text", stacklevel=1)
        return out.getvalue()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert "UserWarning: to the text\n" in captured() >> pool


PROGRAM = """
import warnings
{before}
import skyward as sky

@sky.compute
def warn():
    for _ in range(3):
        warnings.warn("first line\\nsecond line")

with sky.ComputePool(nodes=3) as pool:
    warn() @ pool
    warn() @ pool
"""


def run(tmp_path: Path, before: str = "", *flags: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(before=before))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, *flags, str(program)], env=environment, capture_output=True, text=True, timeout=240
    )
    return done.stdout + done.stderr


def test_the_same_warning_of_several_nodes_is_shown_once_with_all_of_them(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert said.count("UserWarning: first line\n") == 1
    assert said.count("] second line\n") == 1
    assert said.count(']   warnings.warn("first line\\nsecond line")\n') == 1
    shown = next(line for line in said.splitlines() if "UserWarning: first line" in line)
    others = re.findall(r"the same UserWarning \(.*program\.py:9\) on nodes? (.*)", said)
    named = [int(shown[len("[node-")]), *(int(number) for line in others for number in re.findall(r"\d+", line))]
    assert sorted(named) == [0, 1, 2], said
    assert MARK not in said


def test_python_w_counts_on_nodes(tmp_path: Path) -> None:
    assert "first line" not in run(tmp_path, "", "-W", "ignore")
    assert "UserWarning: first line\nsecond line" in run(tmp_path, "", "-W", "error::UserWarning")
    assert run(tmp_path, "warnings.simplefilter('always')").count("UserWarning: first line\n") == 18


def test_nodes_are_told_when_filters_change() -> None:
    watch = Watch()
    assert watch.news() is None
    with warnings.catch_warnings():
        assert watch.news() is None, "nothing is otherwise"
        warnings.simplefilter("ignore", Rough)
        news = watch.news()
        assert news == snapshot()
        assert news is not None
        assert news["warnings"][0] == ("ignore", None, f"{__name__}:Rough", None, True, 0)
    assert watch.news() == snapshot(), "nodes still have the other filters"


@pytest.mark.parametrize(
    "kinds", ["[]", "[1]", '"text"', '["' + "a" * 2000 + '"]', str(["a"] * 50).replace("'", '"'), "null"]
)
def test_a_line_that_is_no_warning_stays_a_line(kinds: str) -> None:
    rest = '"text": "t", "path": "p", "line": 1, "source": ""'
    assert parsed(f'{MARK}warning {{"kinds": {kinds}, {rest}}}') is None
    assert parsed(f'{MARK}warning {{"kinds": ["builtins:UserWarning"], {rest}}}') is not None


def test_what_nodes_make_up_is_kept_within_bounds() -> None:
    lines = WarningLines()
    for i in range(20_000):
        event = Warned("p", i % 3, ("builtins:UserWarning",), f"text {i}", "p.py", 1, "")
        assert lines.lines(event, 0.0) == [f"p.py:1: UserWarning: text {i}"]
    assert len(lines._nodes) <= 1000
    assert len(lines._seen) <= 10_000
