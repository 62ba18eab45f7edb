"""The page of a pool with a hundred nodes and a hundred thousand calls: what it asks for and draws stays small."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.history.store import find
from skyward.view.page.server import PageServer
from tests.support import browser as support
from tests.support.large_history import large, more, recorded
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable() or "there is one")

_BYTES = """
const seen = performance.getEntriesByType("resource").filter((each) => each.name.includes("/data/"));
return seen.map((each) => [new URL(each.name).pathname, each.encodedBodySize]);
"""
_FRAMES = """
const done = arguments[arguments.length - 1], box = document.getElementById("lanes-box"), frames = [];
let last = performance.now(), count = 0;
function step(now) {
  frames.push(now - last); last = now;
  if (++count > 40) { done(frames.slice(1)); return; }
  box.scrollTop += 30; zoom(count % 2 ? 0.8 : 1.2);
  requestAnimationFrame(step);
}
requestAnimationFrame(step);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PageServer, Any]]:
    root: Path = tmp_path_factory.mktemp("large")
    recorder = recorded(root, large(100, 100_000, time.time() - 3600))
    server = PageServer(find("large", root))
    yield server, recorder
    server.close()
    recorder.close()


def test_a_hundred_nodes_and_a_hundred_thousand_calls_stay_windowed(page: tuple[PageServer, Any]) -> None:
    server, recorder = page
    with support.browser() as driver:

        def text(id: str) -> str:
            return driver.execute_script("return document.getElementById(arguments[0]).textContent", id)

        driver.get(server.address())
        until(lambda: text("pool") == "large", 20, "the top of the page, before all is read")
        until(lambda: "done99,899failed101" in text("figures"), 120, lambda: text("figures"))
        until(lambda: text("calls"), 30)
        for number in range(3):
            for event in more(number, 100, time.time()):
                recorder.record(event)
            recorder.flush()
            time.sleep(1.1)
        frames = driver.execute_async_script(_FRAMES)
        for tab in ("output", "metrics", "events", "calls"):
            driver.execute_script("openTab(arguments[0])", tab)
            until(
                lambda tab=tab: driver.execute_script(
                    "return document.getElementById(arguments[0]).children.length", tab
                ),
                30,
            )
        sizes = driver.execute_script(_BYTES)
        largest: dict[str, int] = {}
        for path, size in sizes:
            largest[path] = max(largest.get(path, 0), size)
        print(largest, f"frames: median {sorted(frames)[20]:.0f} ms, longest {max(frames):.0f} ms")
        assert largest["/data/lanes"] < 400_000
        assert largest["/data/nodes"] < 150_000
        assert largest["/data/metrics"] < 400_000
        assert largest["/data/calls"] < 100_000
        assert driver.execute_script("return document.querySelectorAll('*').length") < 6_000
        canvas = driver.execute_script("const c = document.getElementById('lanes'); return c.width * c.height")
        assert canvas < 1_400 * 400 * 4
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
