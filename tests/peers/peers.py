"""Runs test modules of installed packages in a pytest of their own, with our plugin and without our settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["run"]


def run(modules: list[str], skipped: dict[str, str], *, active: bool) -> int:
    """The exit status of pytest; `active` makes our backend the default for tests that name none."""
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
        command = [sys.executable, "-m", "pytest", "-p", "skyward_peers", "-p", "no:cacheprovider", "-q"]
        command += ["-c", os.devnull, "--rootdir", empty, "-W", "ignore", "--timeout", "120", *sys.argv[1:]]
        status = subprocess.run([*command, "--pyargs", *modules], env=env, check=False).returncode
    print(f"took {time.monotonic() - began:.0f} s")
    return status
