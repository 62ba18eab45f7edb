"""A real browser for tests: Debian's chromium, driven by selenium."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["PACKAGES", "browser", "unavailable"]

PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}


def unavailable() -> str:
    """Why there is no browser here; empty if there is one."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed: `make test` does that"
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)} here: `make hosts` installs them" if missing else ""


@contextmanager
def browser(width: int = 1400, height: int = 1200, dark: bool = False) -> Generator[Any]:
    """A browser without a window; its driver ends with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(option)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver: Any = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        driver.set_page_load_timeout(120)
        driver.set_script_timeout(60)
        yield driver
    finally:
        driver.quit()


def main() -> int:
    """Installs the browser; a machine that has none to install skips its tests."""
    from tests.support.hosts import HostsError, install

    try:
        install(PACKAGES)
    except HostsError as exc:
        print(f"no browser, so tests of pages are left out: {exc}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
