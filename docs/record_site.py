"""Takes the pictures of the documentation site, built from these files: `python docs/record_site.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from photograph import ROOT, photograph

__all__ = ["phone"]


def main() -> None:
    """Builds the site, and looks at it on a desk and on a phone, light and dark; no server is needed to read it."""
    from tests.support.browser import browser

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
        for end, dark in ((".png", False), ("-dark.png", True)):
            with browser(1300, 1000, dark) as driver:
                driver.get(Path(folder, "index.html").as_uri())
                photograph(driver, f"site{end}")
                phone(driver)
                driver.get(Path(folder, "guides", "errors-and-retries.html").as_uri())
                photograph(driver, f"site-phone{end}")


def phone(driver: Any) -> None:
    """Has the browser be one of a phone, 390 pixels wide."""
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


if __name__ == "__main__":
    main()
