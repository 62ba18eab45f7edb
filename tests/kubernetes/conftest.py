"""Pools on a real Kubernetes: its own control plane, and three nodes that are test hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from tests.support.folder import shared_by
from tests.support.hosts.spec import USERS
from tests.support.kubernetes.cluster import Cluster, unavailable_kubernetes
from tests.support.waiting import until

_shared, pytest_runtest_teardown = shared_by(Path(__file__).parent)

NUMBER = USERS["sky"]
USER: dict[str, Any] = {"spec": {"securityContext": {"runAsUser": NUMBER, "runAsGroup": NUMBER, "fsGroup": NUMBER}}}
"""Pods of the tests share a cache with other tests, which belongs to this user."""


@pytest.fixture(scope="session", autouse=True)
def _kubernetes_possible() -> None:
    """All of these tests need a control plane."""
    if reason := unavailable_kubernetes():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cache(hosts_cache: Path) -> Path:
    """What pods keep between pools: a directory that all nodes share, like a volume."""
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)
    return hosts_cache


@pytest.fixture(scope="session", autouse=True)
def _home(client_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The client's own cache and ledgers lie in directories of this run."""
    patch = _shared.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("SKYWARD_CACHE", str(client_cache))
    patch.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session")
def cluster(cache: Path) -> Cluster:
    """A cluster that this process's kubectl finds."""
    made = _shared.enter_context(Cluster(cache))
    patch = _shared.enter_context(pytest.MonkeyPatch.context())
    for name, value in made.environ.items():
        patch.setenv(name, value)
    return made


@pytest.fixture
def provider(cluster: Cluster) -> sky.Kubernetes:
    return sky.Kubernetes(template=USER, lease=20)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no Job, Secret, pod or process of one is left, unless a shared pool is open."""
    if "cluster" not in request.fixturenames or "pool" in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    before = _things(cluster)
    yield

    def left() -> list[str]:
        return sorted(_things(cluster) - before)

    until(lambda: not left(), 120, left())


def _things(cluster: Cluster) -> set[str]:
    listed = cluster.kubectl("get", "jobs,secrets,pods,services,configmaps", "-o", "name").split()
    processes = {
        f"{host.name}: {process.pid} {' '.join(process.argv)}"
        for host in cluster.network
        if host.alive
        for process in host.processes("sky")
    }
    return {name for name in listed if "kube-root-ca" not in name} | processes


@pytest.fixture
def environ(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    """Variables for a program of its own that opens a pool, with ledgers of its own."""
    return {**os.environ, "SKYWARD_STATE": str(tmp_path / "state")}
