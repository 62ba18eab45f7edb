"""Runs the test suite in two lanes side by side: tests on hosts mostly wait, the others mostly compute.

    python tests/lanes.py [arguments for pytest]

What the lane with the hosts prints is shown at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOSTS = ["tests/ssh", "tests/cloud", "tests/support/test_hosts.py", "tests/support/test_hosts_leftovers.py"]


def main() -> int:
    """Statuses of both lanes; 0 if both passed."""
    here = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile() as quiet:
        beside = subprocess.Popen([*here, *HOSTS], cwd=ROOT, stdout=quiet, stderr=subprocess.STDOUT)
        try:
            status = subprocess.call([*here, "tests", *(f"--ignore={path}" for path in HOSTS)], cwd=ROOT)
            beside.wait()
        finally:
            beside.terminate()
            beside.wait()
        quiet.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(b"\nOn hosts:\n" + quiet.read())
    return status or beside.returncode


if __name__ == "__main__":
    sys.exit(main())
