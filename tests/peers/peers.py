"""Runs test modules of installed packages in a pytest of their own, with our plugin and without our settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from figures import Figures

__all__ = ["run"]


def run(part: str, modules: list[str], skipped: dict[str, str], *, active: bool) -> Figures:
    """What came of them; `active` makes our backend the default for tests that name none."""
    print(f"{', '.join(modules)}: skipped, by part of a test's name")
    for name, reason in skipped.items():
        print(f"  {name}: {reason}")
    here = str(Path(__file__).parent)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "SKYWARD_PEERS_ACTIVE": str(int(active)),
        "SKYWARD_PEERS_SKIP": json.dumps(skipped),
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as empty:
        report = Path(empty, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "skyward_peers", "-p", "no:cacheprovider", "-q"]
        command += ["-c", os.devnull, "--rootdir", empty, "-W", "ignore", "--timeout", "120", f"--junitxml={report}"]
        status = subprocess.run([*command, "--pyargs", *modules], env=env, check=False).returncode
        figures = _read(part, report)
    if status and not figures.failures:
        figures.failures["pytest"] = f"ended with status {status}"
    figures.seconds = time.monotonic() - began
    return figures


def _read(part: str, report: Path) -> Figures:
    figures = Figures(part)
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        name = f"{case.get('classname')}.{case.get('name')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            figures.failures[name] = bad.get("message", "")[:500]
        elif skip is not None:
            figures.skips[name] = skip.get("message", "")
        else:
            figures.passed += 1
    return figures
