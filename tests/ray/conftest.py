"""Real pools on a real Ray: three nodes on test hosts, started once for all of these tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.hosts import lacks_python, unavailable
from tests.support.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def cluster(hosts_cache: Path, client_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Ray on three hosts; a test that breaks a node starts it again."""
    if reason := unavailable() or lacks_python() or ("" if find_spec("ray") else "ray is not installed"):
        pytest.skip(reason)
    before = os.environ.get("SKYWARD_CACHE")
    os.environ["SKYWARD_CACHE"] = str(client_cache)
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)  # what other hosts have left by dying
    with RayCluster(hosts_cache, tmp_path_factory.mktemp("stand-ins")) as started:
        yield started
    if before is None:
        del os.environ["SKYWARD_CACHE"]
    else:
        os.environ["SKYWARD_CACHE"] = before
