"""The documentation site: it builds without a warning, says what the code says, and needs no network."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from tests.support import browser as support
from tests.support.waiting import until

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return out


def test_pages_that_follow_from_the_code_say_what_it_says() -> None:
    done = subprocess.run(
        [sys.executable, "docs/make_pages.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_reference_has_every_public_name_and_explains_its_parameters(site: Path) -> None:
    page = (site / "reference.html").read_text()
    for name in sky.__all__:
        assert f"sky.{name}</code>" in page, f"the reference lacks sky.{name}"
    assert "max_hourly_cost" in page


def test_every_error_has_its_place(site: Path) -> None:
    page = (site / "errors.html").read_text()
    for name in sky.errors.__all__:
        if name != "SkywardError":
            assert f"<code>{name}</code>" in page, f"docs/errors.md lacks {name}: is it in the tree of errors.py?"


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)", text)
        assert loaded == [], f"{page.name} loads {loaded}"
    for style in site.rglob("*.css"):
        loaded = re.findall(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)", style.read_text())
        assert loaded == [], f"{style.name} loads {loaded}"


def test_pictures_are_small_and_come_light_and_dark() -> None:
    pictures = {picture.name: picture.stat().st_size for picture in (ROOT / "docs" / "pictures").glob("*.png")}
    assert max(pictures.values()) <= 200_000, pictures
    for name in pictures:
        if not name.endswith("-dark.png"):
            assert name.replace(".png", "-dark.png") in pictures, f"`make pictures` takes {name} in the dark, too"


def test_guides_and_the_tutorial_lead_to_the_whole_of_their_programs(site: Path) -> None:
    for page in (site / "tutorial.html", *sorted((site / "guides").glob("*.html"))):
        text = page.read_text()
        led = set(re.findall(r'href="((?:\.\./)*examples/[^"]+\.html)"', text))
        targets = {(page.parent / target).resolve() for target in led}
        assert targets, f"{page.name} leads to no program"
        assert all(target.is_file() for target in targets), (page.name, targets)
        for quoted in re.findall(r"# from (?:<a [^>]*>)?(examples/[\w/]+)\.py", text):
            assert (site / f"{quoted}.html").resolve() in targets, (
                f"{page.name} quotes {quoted} and does not link to it"
            )


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", params=[False, True], ids=["light", "dark"])
def chromium(request: pytest.FixtureRequest) -> Iterator[Any]:
    if reason := support.unavailable():
        pytest.skip(reason)
    with support.browser(1200, 900, dark=request.param) as driver:
        driver.dark = request.param
        yield driver


@pytest.mark.parametrize("served", [False, True], ids=["from files", "served"])
def test_who_types_into_the_search_finds_the_page(chromium: Any, site: Path, address: str, served: bool) -> None:
    start = address if served else site.as_uri()
    chromium.get(f"{start}/index.html")
    typed = chromium.find_element("css selector", ".md-search__input")
    until(typed.is_displayed, what="the field for the search")
    typed.click()
    typed.send_keys("safe to repeat")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    until(lambda: any("errors-and-retries" in link for link in chromium.execute_script(found)), what="the guide")
    link = next(link for link in chromium.execute_script(found) if "errors-and-retries" in link)
    chromium.get(link)
    assert "Errors and retries" in chromium.title
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []
    if served:
        loaded = chromium.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert loaded
        assert [name for name in loaded if not name.startswith((address, "data:"))] == []


SEARCHES = {
    "install": "index.html#install",
    "timeout": "errors-and-retries",
    "retry failed": "errors-and-retries",
    "NodeLost": "errors.html#nodelost",
    "resume training": "files.html",
    "MASTER_ADDR": "pytorch-distributed",
    "oom": "errors-and-retries",
}


def test_the_search_puts_what_helps_before_what_lists_everything(chromium: Any, site: Path) -> None:
    listed = r"""return [...document.querySelectorAll('.md-search-result__link')]
        .filter(link => link.getClientRects().length).slice(0, 3).map(link => link.href.replace(/\?[^#]*/, ''))"""
    for words, page in SEARCHES.items():
        chromium.get((site / "index.html").as_uri())
        typed = chromium.find_element("css selector", ".md-search__input")
        until(typed.is_displayed, what="the field for the search")
        typed.click()
        typed.send_keys(words)
        until(
            lambda page=page: any(page in link for link in chromium.execute_script(listed)),
            what=lambda page=page: f"{page} among the first three, not {chromium.execute_script(listed)}",
        )


def test_pages_fit_a_phone_and_show_the_pictures_of_their_colours(chromium: Any, site: Path) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        guides = ("guides/errors-and-retries", "guides/notebooks", "guides/history", "guides/aws")
        for page in ("index", "tutorial", "comparison", "cli", "concepts", "errors", "reference", *guides):
            chromium.get((site / f"{page}.html").as_uri())
            assert chromium.execute_script("return document.documentElement.scrollWidth") <= 390, page
        chromium.get((site / "guides" / "notebooks.html").as_uri())
        shown = chromium.execute_script(
            "return [...document.querySelectorAll('img[src*=pictures]')].filter(i => i.offsetWidth).map(i => i.src)"
        )
        assert [("notebook-dark.png" in source) for source in shown] == [chromium.dark]
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
