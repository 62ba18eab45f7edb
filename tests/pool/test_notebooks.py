"""Which pools of a notebook are still used after a cell."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import pytest

from skyward.api.html import PageAddress
from skyward.pool import notebooks

# pyright: reportPrivateUsage=false


class Pool:
    """Stands for a pool."""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(
        user_ns={"_oh": {}}, user_ns_hidden={}, displayhook=SimpleNamespace(), last_execution_result=None
    )
    monkeypatch.setattr(notebooks, "_shell", lambda: made)
    return made


def test_a_pool_that_only_a_running_thread_refers_to_is_used(shell: SimpleNamespace) -> None:
    begun, go, found = threading.Event(), threading.Event(), list[weakref.ref[Pool]]()

    def work() -> None:
        pool = Pool()
        found.append(weakref.ref(pool))
        begun.set()
        go.wait(60)
        del pool

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    assert notebooks._is_used(found[0])
    go.set()
    thread.join(60)


def test_looking_at_a_thread_keeps_nothing_that_it_deletes(shell: SimpleNamespace) -> None:
    begun, go, deleted, end = (threading.Event() for _ in range(4))
    found = list[weakref.ref[Pool]]()

    def work() -> None:
        pool = Pool()
        found.append(weakref.ref(pool))
        begun.set()
        go.wait(60)
        del pool
        deleted.set()
        end.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(60)
        assert notebooks._is_used(found[0])
        go.set()
        assert deleted.wait(60)
        assert found[0]() is None
    finally:
        go.set()
        end.set()
        thread.join(60)


def test_looking_at_a_thread_leaves_the_locals_that_it_has_asked_for(shell: SimpleNamespace) -> None:
    begun, go, seen = threading.Event(), threading.Event(), list[str]()
    pool = Pool()

    def work(rate: float) -> None:
        settings = locals()
        begun.set()
        go.wait(60)
        seen.extend(settings)

    thread = threading.Thread(target=work, args=(0.5,))
    thread.start()
    assert begun.wait(60)
    assert not any(notebooks._has(frame, weakref.ref(pool)) for frame in notebooks._frames_of_threads())
    go.set()
    thread.join(60)
    assert "rate" in seen


def test_a_pool_that_only_the_output_of_a_cell_refers_to_is_not_used(shell: SimpleNamespace) -> None:
    shell.user_ns["_oh"][1] = Pool()
    assert not notebooks._is_used(weakref.ref(shell.user_ns["_oh"][1]))
    shell.user_ns["pool"] = shell.user_ns["_oh"][1]
    assert notebooks._is_used(weakref.ref(shell.user_ns["pool"]))


def test_a_saved_notebook_says_where_the_page_is_once_the_kernel_has_ended() -> None:
    shown = PageAddress("http://127.0.0.1:1/?a=1&b=2", "lab")._repr_html_()
    assert 'src="http://127.0.0.1:1/?a=1&amp;b=2"' in shown
    assert "afterwards: <code>sky view lab</code>" in shown
