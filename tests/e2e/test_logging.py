"""What bodies log: at the client's levels, as records through its handlers, or as readable lines."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.client.output import Watch, relay_records, snapshot
from skyward.node.logs import parsed
from skyward.node.settings import MARK
from tests.support.waiting import until


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    logging.root.addHandler(handler)
    yield handler
    logging.root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    before = logging.root.level
    yield
    logging.root.setLevel(before)
    logging.getLogger("my.training").setLevel(logging.NOTSET)


@sky.compute
def talk() -> None:
    log = logging.getLogger("my.training")
    log.debug("a detail")
    log.info("loss %.2f", 0.5)
    log.warning("two\nlines")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it failed")


def mine(kept: Kept) -> list[logging.LogRecord]:
    return [record for record in kept.records if record.name == "my.training"]


def test_records_come_through_the_handlers_of_the_client(pool: sky.ComputePool, kept: Kept) -> None:
    logging.root.setLevel(logging.INFO)
    talk() >> pool
    until(lambda: len(mine(kept)) == 3)
    info, warning, failed = mine(kept)
    assert (info.levelname, info.getMessage()) == ("INFO", "loss 0.50")
    assert (warning.levelname, warning.getMessage()) == ("WARNING", "two\nlines")
    assert failed.levelname == "ERROR"
    assert "it failed\nTraceback" in failed.getMessage()
    assert "ValueError: no" in failed.getMessage()
    assert info.node in (0, 1)  # type: ignore[attr-defined]
    assert info.processName.startswith("node-")
    assert info.filename == "test_logging.py"
    assert info.funcName == "talk"


def test_levels_that_are_set_while_the_pool_is_open_count(pool: sky.ComputePool, kept: Kept) -> None:
    logging.root.setLevel(logging.ERROR)
    talk() >> pool
    until(lambda: len(mine(kept)) == 1)
    logging.getLogger("my.training").setLevel(logging.DEBUG)
    talk() >> pool
    until(lambda: len(mine(kept)) == 5)
    logging.getLogger("my.training").setLevel(logging.NOTSET)
    talk() >> pool
    until(lambda: len(mine(kept)) == 6)


def test_listeners_hear_of_records(pool: sky.ComputePool, kept: Kept) -> None:
    heard: list[sky.events.Log] = []
    remove = pool.on_event(lambda event: isinstance(event, sky.events.Log) and heard.append(event))
    logging.root.setLevel(logging.INFO)
    talk() >> pool
    until(lambda: len(heard) == 3)
    remove()
    assert heard[0].text == "loss 0.50"
    assert heard[0].call is not None


def test_a_body_that_configures_logging_itself_is_left_alone(pool: sky.ComputePool, kept: Kept) -> None:
    @sky.compute
    def own() -> list[str]:
        import io

        out = io.StringIO()
        handler = logging.StreamHandler(out)
        log = logging.getLogger("my.training")
        log.addHandler(handler)
        log.propagate = False
        try:
            log.warning("mine alone")
        finally:
            log.removeHandler(handler)
            log.propagate = True
        return out.getvalue().splitlines()

    assert own() >> pool == ["mine alone"]
    assert mine(kept) == []


def test_an_unfinished_line_swallows_no_record_no_warning_and_no_report(pool: sky.ComputePool, kept: Kept) -> None:
    """As with tqdm beside logging, in a body and in what it starts."""

    @sky.compute
    def train() -> None:
        sys.stderr.write("\r 50%|##  |")
        logging.getLogger("my.training").warning("at half")
        sys.stderr.write("\r 60%|##  |")
        warnings.warn("careful", stacklevel=1)
        sys.stderr.write("\r 70%|### |")
        sky.progress(7, 10)
        sys.stderr.write("\r100%|####|\n")
        subprocess.run(["sh", "-c", "printf unfinished >&2"], check=True)
        logging.getLogger("my.training").warning("at the end")

    heard: list[Any] = []
    kinds = (events.Output, events.Log, events.Warned, events.Progress)
    remove = pool.on_event(lambda event: isinstance(event, kinds) and heard.append(event))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        train() >> pool
        until(lambda: len(mine(kept)) == 2 and getattr(heard[-1], "text", "") == "at the end")
    remove()
    assert [str(warning.message) for warning in given if warning.category is UserWarning] == ["careful"]
    told = [
        event.step if isinstance(event, events.Progress) else event.text
        for event in heard
        if not (isinstance(event, events.Output) and event.progress)
    ]
    assert told == ["at half", "careful", 7, "100%|####|", "unfinished", "at the end"]
    bars = [event.text for event in heard if isinstance(event, events.Output) and event.progress]
    assert list(dict.fromkeys(bars))[:2] == [" 50%|##  |", " 60%|##  |"]
    assert not any(MARK[0] in str(event) for event in heard)


def test_the_functions_of_logging_itself_log_as_loggers_do(pool: sky.ComputePool, kept: Kept) -> None:
    """`logging.info()` would configure logging where no handler is, and later records would stay on the node."""

    @sky.compute
    def talk() -> int:
        logging.info("of the root logger")
        logging.getLogger("my.training").info("of another")
        return len(logging.root.handlers)

    logging.root.setLevel(logging.INFO)
    assert talk() >> pool == 0
    until(lambda: len(mine(kept)) == 1)
    (root,) = [record for record in kept.records if record.name == "root"]
    assert (root.levelname, root.getMessage(), root.funcName) == ("INFO", "of the root logger", "talk")


def test_a_body_may_configure_logging_with_basic_config(pool: sky.ComputePool, kept: Kept) -> None:
    @sky.compute
    def own() -> tuple[str, int]:
        import io

        out = io.StringIO()
        try:
            logging.basicConfig(stream=out, format="own %(message)s")
            logging.warning("mine alone")
            logging.root.handlers.clear()
            logging.basicConfig()
            return out.getvalue(), len(logging.root.handlers)
        finally:
            logging.root.handlers.clear()

    assert own() >> pool == ("own mine alone\n", 1)
    assert not [record for record in kept.records if record.name == "root"]


def test_redirected_output_has_readable_lines(pool: sky.ComputePool, kept: Kept) -> None:
    @sky.compute
    def captured() -> str:
        import contextlib
        import io

        with contextlib.redirect_stderr(io.StringIO()) as out:
            logging.getLogger("my.training").warning("to the text")
        return out.getvalue()

    assert captured() >> pool == "WARNING my.training: to the text\n"


PROGRAM = """
import logging, sys
import skyward as sky
{configure}
@sky.compute
def talk():
    print("printed")
    logging.getLogger("my.training").info("some information")
    logging.getLogger("my.training").warning("a warning")

with sky.ComputePool() as pool:
    talk() >> pool
"""


def run(configure: str, tmp_path: Path) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(configure=configure))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout + done.stderr


def test_without_handlers_lines_have_level_and_logger(tmp_path: Path) -> None:
    said = run("", tmp_path)
    assert "[node-0] WARNING my.training: a warning" in said
    assert "some information" not in said
    assert MARK not in said


def test_with_basic_config_lines_look_as_it_says(tmp_path: Path) -> None:
    said = run("logging.basicConfig(level='INFO', format='%(processName)s/%(levelname)s/%(message)s')", tmp_path)
    assert "node-0/INFO/some information\n" in said
    assert "node-0/WARNING/a warning\n" in said
    assert said.count("a warning") == 1


def test_nodes_are_told_again_only_when_something_was_configured() -> None:
    watch = Watch()
    assert watch.news() is None
    logging.getLogger("my.training").setLevel(logging.DEBUG)
    news = watch.news()
    assert news == snapshot()
    assert news is not None
    assert watch.news() is news
    logging.getLogger("my.training").setLevel(logging.NOTSET)
    assert watch.news() == snapshot()  # nodes still have the other level


def test_each_pool_notices_what_was_configured_and_none_is_kept_for_it() -> None:
    first, second = Watch(), Watch()
    logging.getLogger("my.training").setLevel(logging.DEBUG)
    assert first.news() == second.news() == snapshot()
    logging.getLogger("my.training").setLevel(logging.NOTSET)
    assert first.news() == second.news() == snapshot()
    refs = [weakref.ref(first), weakref.ref(second)]
    del first, second
    assert [ref() for ref in refs] == [None, None]


def written(**about: Any) -> str:
    """A line as a body may write it by itself."""
    record = {"logger": "a", "level": 40, "created": 1.0, "text": "t", "path": "p", "line": 1, "function": "f"}
    return f"log {json.dumps(record | about)}"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "log",
        "log {",
        "log []",
        'log {"logger": 3}',
        "log " + "[" * 100_000,
        'log {"logger": "a", "level": true}',
        "x {}",
        written(created=float("nan")),
        written(created=float("inf")),
        written(created=1e300),
        written(level=10**4000),
        written(line=-(10**100)),
        written(logger="a." * 20_000),
        f'progress {{"step": {10**4000}, "total": 1, "metrics": {{}}}}',
        f'progress {{"step": 1, "total": 2, "metrics": {{"loss": {10**4000}}}}}',
    ],
)
def test_a_line_that_is_no_record_stays_a_line(line: str) -> None:
    assert parsed(MARK + line) is None
    assert parsed(line) is None


def test_records_of_nodes_leave_no_loggers_here() -> None:
    """A logger is never forgotten: names that bodies make up would add up to all the memory that there is (SEC-7)."""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    parent, silent = logging.getLogger("of_this_program"), logging.getLogger("of_this_program.silent")
    parent.addHandler(handler)
    parent.addFilter(lambda record: record.name == parent.name)  # counts for what is logged to it, as ever
    silent.disabled = True
    before = len(logging.root.manager.loggerDict)
    names = ["of_this_program", "of_this_program.silent", *(f"of_this_program.{'a.' * 400}{i}" for i in range(20))]
    try:
        for name in names:
            relay_records(events.Log("p", 0, name, logging.ERROR, 1.0, "t", "p", 1, "f"))
    finally:
        parent.removeHandler(handler)
        parent.filters.clear()
        silent.disabled = False
    assert [record.name for record in heard] == [name for name in names if name != silent.name]
    assert len(logging.root.manager.loggerDict) == before
