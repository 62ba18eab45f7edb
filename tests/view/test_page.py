"""The page of a pool in a real browser: it opens, updates, filters, survives, and executes nothing that it shows."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.history.recorder import Recorder
from skyward.history.store import find
from skyward.view.page.server import PageServer
from tests.support import browser as support
from tests.support.colours import contrast
from tests.support.waiting import until

needs_browser = pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable() or "there is one")

HOSTILE = '<img src=x onerror="document.title=1">\x1b[31m</pre><script>document.title="taken"</script>'


@sky.compute
def train(steps: int) -> int:
    for step in range(steps):
        print("step", step)
        sky.progress(step, steps, loss=1 / (step + 1))
    return steps


@sky.compute
def sweep(number: int) -> None:
    for step in range(3):
        sky.progress(step, 3, score=number)


@sky.compute
def fail(reason: str) -> None:
    print(HOSTILE)
    raise ValueError(reason)


@sky.compute
def wait(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, console=False, name="paged") as pool:
        _ = train(5) @ pool
        with pytest.raises(ValueError, match="luck"):
            _ = fail("no luck") >> pool
        yield pool


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with support.browser() as driver:
        yield driver


def _text(driver: Any, id: str) -> str:
    return driver.execute_script("return document.getElementById(arguments[0]).textContent", id)


def _get(address: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode(), dict(exc.headers)


def _key(page: str) -> str:
    return page.partition('data-key="')[2].partition('"')[0]


@needs_browser
def test_a_group_in_which_calls_failed_is_done_and_says_how_many(pool: sky.ComputePool, chromium: Any) -> None:
    found = sky.gather(train(1), fail("no luck"), train(1), train(1), return_exceptions=True) >> pool
    assert sum(isinstance(result, ValueError) for result in found) == 1
    chromium.get(str(pool.view()))
    until(lambda: "4 of 4 (1 failed)" in _text(chromium, "groups"), what="the end of the group")
    assert "stopped" not in _text(chromium, "groups")


def test_words_of_the_page_can_be_read_on_what_is_behind_them() -> None:
    """Contrast of 4.5, as WCAG AA wants it, in both colour schemes."""
    style = (Path(sky.__file__).parent / "view" / "page" / "static" / "style.css").read_text()
    light, dark = (
        dict(re.findall(r"(--\w+): (#\w{6})", part)) for part in style.split("\n*")[0].split("@media (prefers", 1)
    )
    for scheme in (light, light | dark):
        pairs = [(word, behind) for word in ("--text", "--faint", "--bad") for behind in ("--back", "--card")]
        pairs += [("--on", behind) for behind in ("--accent", "--ok", "--running", "--bad", "--gone")]
        for word, behind in pairs:
            assert contrast(scheme[word], scheme[behind]) >= 4.5, (word, behind, scheme[behind])


@needs_browser
def test_the_page_opens_updates_filters_and_survives_a_reload(
    pool: sky.ComputePool, chromium: Any, tmp_path: Path
) -> None:
    chromium.get(str(pool.view()))
    until(lambda: _text(chromium, "state") == "open")
    assert "2 of 2 up" in _text(chromium, "figures")
    until(lambda: "train(5)" in _text(chromium, "calls"))
    assert "token" not in chromium.current_url

    gate = tmp_path / "gate"
    future = wait(str(gate)) > pool
    until(lambda: "running" in _text(chromium, "calls"), what="a call that began after the page was opened")
    gate.touch()
    future.result()
    until(lambda: "running" not in _text(chromium, "calls"))

    chromium.execute_script(
        "const e = document.getElementById('calls-outcome'); e.value = 'failed'; e.dispatchEvent(new Event('input'))"
    )
    until(lambda: "train" not in _text(chromium, "calls") and "fail('no luck')" in _text(chromium, "calls"))

    chromium.refresh()
    until(lambda: _text(chromium, "state") == "open", what="the page after a reload")
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


@needs_browser
def test_details_of_a_failed_call_have_arguments_output_and_traceback_and_execute_nothing(
    pool: sky.ComputePool, chromium: Any
) -> None:
    """SEC-23."""
    chromium.get(str(pool.view()))
    until(lambda: "fail('no luck')" in _text(chromium, "calls"))
    chromium.execute_script("[...document.querySelectorAll('#calls tr')].find(r => /fail/.test(r.textContent)).click()")
    until(lambda: "raise ValueError(reason)" in _text(chromium, "details"))
    assert "'no luck'" in _text(chromium, "details")
    assert "<script>document.title=" in _text(chromium, "details")
    chromium.execute_script("openTab('output')")
    until(lambda: "onerror" in _text(chromium, "output"))
    assert (
        chromium.execute_script("return document.querySelectorAll('img, #output script, #details script').length") == 0
    )
    assert chromium.title == "paged · Skyward"


@needs_browser
def test_metrics_are_curves_and_events_are_listed(pool: sky.ComputePool, chromium: Any) -> None:
    chromium.get(str(pool.view()))
    until(lambda: _text(chromium, "state") == "open")
    chromium.execute_script("openTab('metrics')")
    until(lambda: "loss" in _text(chromium, "metrics"))
    until(lambda: chromium.execute_script("return document.querySelectorAll('.metric path').length") >= 2)
    chromium.execute_script("openTab('events')")
    until(lambda: "open: 2 nodes" in _text(chromium, "events"))


@needs_browser
def test_a_curve_among_many_is_named_where_the_pointer_is_and_its_box_grows(
    pool: sky.ComputePool, chromium: Any
) -> None:
    _ = sky.gather(*(sweep(number) for number in range(12))) >> pool
    chromium.get(str(pool.view()))
    until(lambda: _text(chromium, "state") == "open")
    chromium.execute_script("openTab('metrics')")
    until(lambda: "12 curves, last 0 to 11" in _text(chromium, "metrics"))
    keys = """
    const card = [...document.querySelectorAll('.metric')].find((each) => /score/.test(each.textContent));
    return [...card.querySelectorAll('.keys button b')].map((each) => each.textContent.trim());
    """
    assert chromium.execute_script(keys) == [str(number) for number in range(8)], "sorted by their last value"
    turn = """
    const card = [...document.querySelectorAll('.metric')].find((each) => /score/.test(each.textContent));
    [...card.querySelectorAll('.keys .link')].find((each) => each.textContent === 'highest first').click();
    """
    chromium.execute_script(turn)
    until(lambda: chromium.execute_script(keys) == [str(number) for number in range(11, 3, -1)], what="the other order")
    short = "return labels([{ arguments: '0.12345678901234567, 3' }, { arguments: '1.5e-05, 4' }])"
    assert chromium.execute_script(short) == ["(0.1235, 3)", "(1.5e-05, 4)"]
    point = """
    const card = [...document.querySelectorAll('.metric')].find((each) => /score/.test(each.textContent));
    const svg = card.querySelector('.plot svg'), box = svg.getBoundingClientRect();
    const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height * 0.03 };
    svg.dispatchEvent(new PointerEvent('pointermove', at));
    return card.querySelector('.read').textContent;
    """
    assert "sweep(11)" in chromium.execute_script(point)
    grow = """
    const card = [...document.querySelectorAll('.metric')].find((each) => /score/.test(each.textContent));
    card.querySelector('h3 button').click();
    """
    wide = "return Math.max(...[...document.querySelectorAll('.metric .plot svg')].map((each) => each.clientHeight))"
    before = chromium.execute_script(wide)
    chromium.execute_script(grow)
    until(lambda: chromium.execute_script(wide) > before, what="a larger box")


@needs_browser
def test_two_nodes_need_no_scrollbar_and_cpu_and_memory_have_colours_of_their_own(
    pool: sky.ComputePool, chromium: Any
) -> None:
    chromium.get(str(pool.view()))
    until(lambda: "memory" in _text(chromium, "nodes"), what="figures of a node")
    assert chromium.execute_script(
        "const box = document.getElementById('nodes'); return box.scrollHeight <= box.clientHeight"
    )
    colour = "return getComputedStyle(document.querySelector(arguments[0])).stroke"
    assert chromium.execute_script(colour, "svg.use path") != chromium.execute_script(colour, "svg.memory path")


@needs_browser
def test_the_page_of_a_pool_that_was_closed_shows_its_last_state(chromium: Any) -> None:
    with sky.ComputePool(console=False, name="short-lived") as pool:
        chromium.get(str(pool.view()))
        until(lambda: _text(chromium, "state") == "open")
    until(lambda: _text(chromium, "state") == "closed")
    chromium.get(str(pool.view()))
    until(lambda: _text(chromium, "state") == "closed")


@needs_browser
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_window(pool: sky.ComputePool, width: int) -> None:
    with support.browser(width=width, height=900, dark=width == 360) as driver:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 360},
        )
        driver.get(str(pool.view()))
        until(lambda: "train(5)" in _text(driver, "calls"))
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        driver.execute_script("openTab('events')")
        until(lambda: "open: 2 nodes" in _text(driver, "events"))
        boxes = "document.querySelectorAll('#tab-events .scroll, #nodes')"
        beyond = f"return [...{boxes}].map((box) => box.scrollWidth - box.clientWidth)"
        assert driver.execute_script(beyond) == [0, 0]


def test_data_needs_the_key_and_an_address_works_once(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-23."""
    address = str(pool.view())
    base = address.partition("?")[0]
    assert _get(base + "?token=wrong")[0] == 403
    status, page, headers = _get(address)
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"], "no other site shows it within its own"
    key = _key(page)
    assert json.loads(_get(f"{base}data/summary?key={key}")[1])["pool"] == "paged"
    assert _get(f"{base}data/summary?key=wrong")[0] == 403
    assert _get(f"{base}data/summary")[0] == 403
    assert _key(_get(base)[1]) == ""  # the page itself, without data
    server = pool._page[1] if pool._page else None  # pyright: ignore[reportPrivateUsage]
    assert server is not None
    monkeypatch.setattr(server, "_clock", lambda: time.time() + 60)
    assert _get(address)[0] == 403


def test_a_site_whose_name_leads_to_this_computer_gets_nothing(pool: sky.ComputePool) -> None:
    """DNS rebinding: the browser believes that the page is of that site (SEC-23)."""
    address = str(pool.view())
    assert _get(address, host="evil.example:8000")[0] == 403
    assert _get(address, host="localhost:8000")[0] == 200  # ssh -L
    assert _get(str(pool.view()), host="[::1]:8000")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed_through_the_page(pool: sky.ComputePool, method: str) -> None:
    """SEC-23."""
    request = urllib.request.Request(str(pool.view()), method=method, data=b"x")
    with pytest.raises(urllib.error.HTTPError, match="405") as caught:
        urllib.request.urlopen(request, timeout=30)
    caught.value.close()


def test_another_site_that_asks_from_the_users_browser_is_refused(pool: sky.ComputePool) -> None:
    """SEC-23."""
    request = urllib.request.Request(str(pool.view()), headers={"Origin": "https://evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403") as caught:
        urllib.request.urlopen(request, timeout=30)
    caught.value.close()


def test_questions_that_make_no_sense_are_refused_in_words(pool: sky.ComputePool) -> None:
    address = str(pool.view())
    base, key = address.partition("?")[0], _key(_get(address)[1])
    assert _get(f"{base}data/calls?key={key}&node=x")[0] == 400
    assert _get(f"{base}data/nothing?key={key}")[0] == 404
    assert _get(f"{base}../../etc/passwd")[0] == 404
    assert json.loads(_get(f"{base}data/call?key={key}&id=nobody")[1]) is None


def test_the_page_of_another_process_says_that_a_pool_was_killed(tmp_path: Path) -> None:
    recorder = Recorder("victim", tmp_path)
    recorder.record(sky.events.PoolOpening("victim", 1, "Local"))
    recorder.flush()
    server = PageServer(find("victim", tmp_path))
    try:
        assert server.answer("summary", {})["state"] == "opening"
        recorder.close()
        until(lambda: server.answer("summary", {})["state"] == "killed")
    finally:
        server.close()


def test_nobody_who_looks_means_that_nothing_is_read(tmp_path: Path) -> None:
    recorder = Recorder("quiet", tmp_path)
    server = PageServer(find("quiet", tmp_path))
    try:
        for node in range(100):
            recorder.record(sky.events.NodeUp("quiet", node))
        recorder.flush()
        assert server.model.revision == 0
        assert server.answer("summary", {})["revision"] == 100
    finally:
        server.close()
        recorder.close()
