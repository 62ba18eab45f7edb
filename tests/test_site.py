"""The documentation site: it builds without a warning, says what the code says, and needs no network."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import inspect
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
INNER = {  # names that the reference leaves out: for Skyward itself, unless a comment says otherwise
    "ComputePool": {"run_async", "submit_all"},  # deprecated
    "PendingCompute": {"label", "kept", "args", "fn", "kwargs", "chunk"},
    "PendingComputeGroup": {"return_exceptions", "timeout", "progress", "items", "resume"},
    "CallbackWriter": {"flush", "writable"},  # as every text file has them
    **{name: {"kind"} for name in sky.__all__ if name.startswith("Shared")},
}


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


def explained(page: str, heading: str, level: int) -> str:
    """What the reference has below a heading, up to the next one that is no part of it."""
    found = re.search(rf"<code>{heading}</code><a[^>]*>.*?(?=<h[2-{level}] |\Z)", page, re.S)
    assert found, f"the reference has no heading {heading}"
    return found[0]


def public_members(kind: type) -> set[str]:
    """Methods, properties and fields of a class that are Skyward's own, also those that it inherits."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("skyward.")]
    named = {name for base in own for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in named if not name.startswith("_")}


def test_the_reference_has_every_method_of_a_pool_with_an_example(site: Path) -> None:
    page = (site / "pool-methods.html").read_text()
    given = {"name", "nodes", "provider", "spec", "worker"}  # as the constructor explains them
    for name in public_members(sky.ComputePool) - given - INNER["ComputePool"]:
        _, _, example = explained(page, f"pool.{name}", level=3).partition('class="highlight"')
        assert f'"n">{name}</span>' in example, f"the reference has no example of pool.{name}"


def test_the_reference_has_what_public_classes_have_and_nothing_that_only_pools_call(site: Path) -> None:
    page, missing = (site / "reference.html").read_text(), dict[str, set[str]]()
    for name in sky.__all__:
        kind = getattr(sky, name)
        if not inspect.isclass(kind) or kind is sky.ComputePool:
            continue
        text, wanted = explained(page, f"sky.{name}", level=3), public_members(kind) - INNER.get(name, set())
        if issubclass(kind, sky.Provider) and kind is not sky.Provider:
            wanted = {field.name for field in dataclasses.fields(kind) if field.init}
            assert re.search(r"\b(acquire|give_back|readmit)\b", text) is None, name
        if lacks := {member for member in wanted if not re.search(rf"\b{member}\b", text)}:
            missing[name] = lacks
    assert missing == {}


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


def test_guides_that_send_calls_say_how_it_is_done_without_operators(site: Path) -> None:
    for page in (ROOT / "docs" / "guides").glob("*.md"):
        if re.search(r"(>>|@|(?<![-=>])>) (?:pool|sky)\b", page.read_text()):
            assert "concepts.html#without-operators" in (site / "guides" / f"{page.stem}.html").read_text(), page.name


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
    "cancel": "pool-methods.html",
    "pool.map": "pool-methods.html",
    "hyperparameter": "hyperparameter-search",
    "optuna": "hyperparameter-search",
    "docker": "faq.html",
    "cron": "faq.html",
    "detach": "cli.html#detached-runs",
    "num_gpus": "faq.html",
}


def test_the_search_puts_what_helps_before_what_lists_everything(chromium: Any, site: Path) -> None:
    listed = r"""return [...document.querySelectorAll('.md-search-result__link')]
        .filter(link => link.getClientRects().length).slice(0, 3).map(link => link.href.replace(/\?[^#]*/, ''))"""
    for words, page in list(SEARCHES.items())[chromium.dark :: 2]:  # each once, in the one colour or the other
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
            if page == "reference":
                wide = "return [...document.querySelectorAll('article table')].some(table => table.scrollWidth > 390)"
                assert not chromium.execute_script(wide), "what a parameter means is beside the screen"
        chromium.get((site / "guides" / "notebooks.html").as_uri())
        shown = chromium.execute_script(
            "return [...document.querySelectorAll('img[src*=pictures]')].filter(i => i.offsetWidth).map(i => i.src)"
        )
        assert [("notebook-dark.png" in source) for source in shown] == [chromium.dark]
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
