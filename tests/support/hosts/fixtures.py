"""Test hosts for tests: pytest's fixtures. Tests are skipped, with the reason, where there can be no hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .machine import unavailable
from .network import Network

__all__ = ["hosts", "hosts_possible", "make_network", "uv_cache"]


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """Skips what needs hosts where there can be none."""
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what uv has downloaded, for all hosts of a session: HostSpec(share={"/run/uv": uv_cache})."""
    return tmp_path_factory.mktemp("uv-cache")


@pytest.fixture
def make_network(hosts_possible: None) -> Iterator[Callable[..., Network]]:
    """Makes networks with the arguments of `Network`, and removes them after the test."""
    with ExitStack() as made:
        yield lambda *args, **options: made.enter_context(Network(*args, **options))


@pytest.fixture(scope="module")
def hosts(hosts_possible: None) -> Iterator[Network]:
    """Three plain hosts, shared by a module's tests; a test that breaks one mends it."""
    with Network(3) as network:
        yield network
