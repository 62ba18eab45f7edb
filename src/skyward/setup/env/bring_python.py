"""A Python for hosts that have none of the right version and cannot reach uv's servers, fetched onto this computer."""

from __future__ import annotations

import logging
import tarfile
import tempfile
import time
from pathlib import Path

from skyward.api.image import Image
from skyward.errors import BootstrapError
from skyward.setup.env.uv import cache_root, own_directory, run_uv

__all__ = ["fetch_python"]

_STEP = "getting Python for the host"
_KEPT_DAYS = 30  # after which there may be a newer one
_log = logging.getLogger("skyward.resolve")


def fetch_python(image: Image, platform: str, deadline: float) -> Path | None:
    """An archive with a Python for hosts of that platform, or None where this computer cannot get it either."""
    major, minor = image.python_version
    arch, libc = platform.partition("-")[0], "musl" if "musl" in platform else "gnu"
    name = f"cpython-{major}.{minor}-linux-{arch}-{libc}"
    kept = own_directory(cache_root(), "pythons") / f"{name}.tar.gz"
    if kept.exists() and time.time() - kept.stat().st_mtime < _KEPT_DAYS * 86400:
        return kept
    with tempfile.TemporaryDirectory(dir=kept.parent) as directory:
        work = Path(directory)
        try:
            run_uv(_STEP, ["python", "install", "--no-bin", "--install-dir", str(work / "all"), name], image, deadline)
        except BootstrapError as exc:
            _log.info("no Python for %s: %s", platform, exc)
            return kept if kept.exists() else None
        with tarfile.open(work / "python.tar.gz", "w:gz", compresslevel=6) as tar:
            for made in (work / "all").glob("cpython-*"):
                if not made.is_symlink():  # a link for the minor version leads to where it lies here
                    tar.add(made, made.name)
        (work / "python.tar.gz").replace(kept)
    return kept
