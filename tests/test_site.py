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
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(https?://[^\"'\s>]+)", text)
        assert loaded == [], f"{page.name} loads {loaded}"


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


@pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable() or "there is one")
def test_the_site_can_be_searched_and_fits_a_phone(address: str) -> None:
    with support.browser(1200, 900) as driver:
        driver.get(f"{address}/index.html")
        driver.execute_script(
            "const e = document.querySelector('.md-search__input'); e.focus(); e.value = 'return_exceptions';"
            "e.dispatchEvent(new Event('keyup', {bubbles: true})); e.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        found = "return document.querySelectorAll('.md-search-result__item').length"
        until(lambda: driver.execute_script(found) > 0, what="results of the search")
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        )
        for page in ("index", "tutorial", "comparison", "cli"):
            driver.get(f"{address}/{page}.html")
            assert driver.execute_script("return document.documentElement.scrollWidth") <= 380, page
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
