"""What every test shares: a mark in the environment by which anything left behind is found, and small fixtures."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import shutil
import sys
import threading
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.support.cloud import Cloud

os.environ["SKYWARD_TEST_RUN"] = secrets.token_hex(8)

# One example may take as long as a busy machine needs; by default a fifth of a second is a failure.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a failed test left open, such as pipes that its traceback holds, fails no other test."""
    before = item.session.testsfailed
    result = yield
    if item.session.testsfailed > before:
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return result


@pytest.fixture(scope="session", autouse=True)
def state_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Histories and ledgers of pools in tests are none of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a function waits for that does not return; opened at the end of the test."""
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing is logged about callbacks that fail on purpose."""
    logging.getLogger("skyward.callbacks").disabled = True
    yield
    logging.getLogger("skyward.callbacks").disabled = False


@pytest.fixture
def no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on no node."""
    monkeypatch.delenv("COMPUTE_POOL", raising=False)


@pytest.fixture(scope="session")
def hosts_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What hosts and machines of the test cloud keep between pools, one for all: environments are made once."""
    directory = tmp_path_factory.mktemp("hosts-cache")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)  # gigabytes, once torch is in it


@pytest.fixture(scope="session")
def client_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's own cache of resolved packages, for tests on hosts."""
    return tmp_path_factory.mktemp("client-cache")


@pytest.fixture(scope="module")
def shared_cloud() -> Iterator[Cloud]:
    """One test cloud for all tests of a file: starting one takes seconds."""
    from tests.support.cloud import Cloud

    with Cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(shared_cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A test cloud without machines, that AWS's own variables lead to; what a test leaves there is given back."""
    from skyward.machines.ledger import histories
    from skyward.transport import journal

    shared_cloud.forget()
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    for name, value in shared_cloud.environ.items():
        monkeypatch.setenv(name, value)
    yield shared_cloud
    shared_cloud.faults.clear()
    shared_cloud.expired = False
    for ledger in list(journal._HELD):
        ledger.close()
    for found in list(histories()):
        shared_cloud.aws().give_back(found.pool)
