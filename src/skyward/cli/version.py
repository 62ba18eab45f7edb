"""`sky version`: Skyward's version; with --verbose also Python, the system and relevant packages."""

from __future__ import annotations

import argparse
from typing import Any

from skyward.cli.common import add_command, add_json, print_json

__all__ = ["add", "facts", "run"]

_PACKAGES = ("cloudpickle", "cryptography", "uv", "boto3", "distributed", "joblib", "numpy", "torch", "jax", "ray")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "version",
        "print the version",
        "Prints the version. With --verbose it adds what a bug report needs: where Skyward is installed, which "
        "Python and system it runs on, and the versions of packages that matter.",
        ["sky version", "sky version --verbose", "sky version --verbose --json"],
        shape="one object: skyward; with --verbose also at, python, system, ssh, and the version of "
        "each package, or 'not installed'.",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print what else a bug report needs")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    found = facts() if arguments.verbose else {"skyward": facts()["skyward"]}
    if arguments.json:
        print_json(found)
    elif not arguments.verbose:
        print(f"skyward {found['skyward']}")
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print(f"{name:{width}}  {value}")
    return 0


def facts() -> dict[str, str]:
    import platform
    import subprocess
    import sys
    from importlib import metadata
    from pathlib import Path

    import skyward

    found = {
        "skyward": skyward.__version__,
        "at": str(Path(skyward.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
    }
    try:
        said = subprocess.run(["ssh", "-V"], capture_output=True, text=True, timeout=10).stderr.strip()
    except (OSError, subprocess.TimeoutExpired):
        said = "not found"
    found["ssh"] = said
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
