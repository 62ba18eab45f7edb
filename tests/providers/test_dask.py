"""sky.Dask: what is decided without a cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest

import skyward as sky
from skyward.errors import HostUnreachable
from skyward.providers.dask import Worker, free_places, more_tasks


def workers(*hosts: str, threads: int = 2) -> list[Worker]:
    return [Worker(f"tcp://{host}:{port}", host, str(port), threads) for port, host in enumerate(hosts)]


def test_each_machine_is_one_place_however_many_workers_it_has() -> None:
    free = free_places(workers("a", "b", "a", "c", "b"), "machine", [])
    assert [worker.address for worker in free] == ["tcp://a:0", "tcp://b:1", "tcp://c:3"]


def test_each_worker_is_a_place_if_that_is_asked_for() -> None:
    there = workers("a", "b", "a")
    assert free_places(there, "worker", []) == there


def test_a_machine_that_has_a_node_gets_no_second_one() -> None:
    there = workers("a", "a", "b")
    assert free_places(there, "machine", there[:1]) == there[2:]
    assert free_places(there, "worker", there[:1]) == there[1:]


def test_tasks_wait_for_as_many_workers_as_are_missing() -> None:
    """An adaptive cluster wants a worker for as many tasks as its workers have threads."""
    assert more_tasks([], missing=3, submitted=0) == 3
    assert more_tasks(workers("a", threads=8), missing=2, submitted=3) == 21
    assert more_tasks(workers("a", "b", threads=4), missing=1, submitted=12) == 0
    assert more_tasks(workers("a", threads=64), missing=200, submitted=0) == 1000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cluster": ""}, "give a dask cluster, a Client, or the scheduler's address"),
        ({"cluster": None}, "give a dask cluster, a Client, or the scheduler's address"),
        ({"cluster": "tcp://x:1", "per": "node"}, "per is one of: machine, worker"),
        ({"cluster": "tcp://x:1", "lease": 0}, "lease=0: it must be a number above 0"),
        ({"cluster": object(), "security": object()}, "a cluster or a Client brings its own"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_at_once(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(sky.errors.InvalidArgument) as caught:
        sky.Dask(**arguments)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_its_repr_shows_where_and_hides_certificates() -> None:
    assert repr(sky.Dask("tls://x:1", security="a key", per="worker")) == "Dask('tls://x:1', per='worker')"
    assert repr(sky.Dask(object())) == "Dask(<object>)"


def test_a_scheduler_that_does_not_answer_is_named() -> None:
    with pytest.raises(HostUnreachable, match=r"the scheduler of 'tcp://127.0.0.1:1' does not accept the connection"):
        sky.Dask("tcp://127.0.0.1:1").acquire(sky.Spec(), "nobody", 1, 2, lambda text: None)


def test_an_address_with_tls_and_no_certificates_says_what_is_missing() -> None:
    with pytest.raises(HostUnreachable, match="security="):
        sky.Dask("tls://127.0.0.1:1").acquire(sky.Spec(), "nobody", 1, 2, lambda text: None)


def test_dask_is_imported_when_it_is_used() -> None:
    source = "import sys, skyward as sky; sky.Dask('tcp://x:1'); print([n for n in sys.modules if 'distributed' in n])"
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=180)
    assert out.stdout == "[]\n"
