"""What is kept of calls that fail: enough to run them again here, within a limit, and never a secret."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import InvalidArgument, TaskCrashed, TaskTimeout
from skyward.history import failed_calls
from skyward.history.failed_calls import FailedCall, PoolOfCalls
from skyward.history.store import entries
from tests.support.waiting import until

LARGE = 1 << 20
LIMIT = 4 * LARGE
CANARY = "canary-5d1c9a77e2"


@sky.compute
def fail(reason: object) -> None:
    raise ValueError("no")


@sky.compute
def fine(value: object) -> None:
    pass


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def pool(state: Path) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(console=False, max_replay_bytes=LIMIT, stall_timeout=None) as pool:
        yield pool


def failed(call: Any, pool: sky.ComputePool) -> BaseException:
    with pytest.raises(Exception) as caught:
        call >> pool
    return caught.value


def kept() -> list[tuple[FailedCall, Path]]:
    return [each for entry in entries() for each in failed_calls.kept(entry)]


def one() -> tuple[FailedCall, Path]:
    until(lambda: kept())
    (found,) = kept()
    return found


def pool_of(call: FailedCall, path: Path) -> PoolOfCalls:
    return pickle.loads(failed_calls.load(call, path)[-1])


def contents(state: Path) -> bytes:
    return b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())


def test_a_failed_call_is_kept_with_its_arguments_for_its_user_alone(pool: sky.ComputePool) -> None:
    failed(fail(bytes(2 * LARGE)), pool)
    call, path = one()
    shared = pool_of(call, path)
    assert (call.name, call.outcome, call.node, call.refused) == ("fail", "error", 0, "")
    assert shared.name == pool.name
    large = next(iter(call.files.values()))
    assert path.with_name(f"{large}.data").read_bytes() == bytes(2 * LARGE)
    modes = {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_nothing_is_kept_of_calls_that_succeed(pool: sky.ComputePool) -> None:
    fine(bytes(LARGE)) >> pool
    pool.close()
    assert not list(entries()[0].path.parent.glob("failed"))


@pytest.mark.parametrize("how", ["exits", "killed", "too long"])
def test_crashes_and_time_limits_are_kept_too(pool: sky.ComputePool, how: str) -> None:
    @sky.compute
    def end() -> None:
        import signal
        import time

        if how == "exits":
            os._exit(3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    error = failed(end().with_timeout(0.3) if how == "too long" else end(), pool)
    assert isinstance(error, TaskTimeout if how == "too long" else TaskCrashed)
    assert one()[0].outcome == ("timeout" if how == "too long" else "crashed")


def test_of_a_broadcast_the_rank_that_failed_first_is_kept(state: Path) -> None:
    @sky.compute
    def fails_on_one() -> None:
        if sky.instance_info().rank == 1:
            raise ValueError("rank 1")
        import time

        time.sleep(600)

    with sky.ComputePool(nodes=2, console=False) as pool:
        with pytest.raises(ValueError):
            fails_on_one() @ pool
    found = one()[0]
    assert (found.rank, bool(found.group)) == (1, True)
    assert '"total_nodes":2' in found.info


def test_items_of_a_map_that_fail_one_by_one_are_kept(pool: sky.ComputePool) -> None:
    results = pool.map(lambda x: 1 // x, [1, 0, 2], return_exceptions=True)
    assert isinstance(results[1], ZeroDivisionError)
    assert one()[0].outcome == "error"


def test_what_the_user_cancels_is_not_kept(pool: sky.ComputePool) -> None:
    @sky.compute
    def forever() -> None:
        import time

        time.sleep(600)

    future = forever() > pool
    until(lambda: future.running())
    future.cancel()
    pool.close()
    assert kept() == []


def test_a_call_as_large_as_the_limit_is_kept_and_one_byte_more_is_not(pool: sky.ComputePool) -> None:
    failed(fail(b"x" * 100), pool)
    spent = one()[0].size - 100
    pool.close()
    with sky.ComputePool(console=False, max_replay_bytes=LIMIT) as pool:
        failed(fail(bytes(LIMIT - spent - 1000)), pool)
        room = LIMIT - _sizes(pool)[0]
        failed(fail(bytes(LIMIT - spent - 1000 + room)), pool)
        failed(fail(bytes(LIMIT - spent - 1000 + room + 1)), pool)
        until(lambda: len(_refusals(pool)) == 2)
        assert _refusals(pool)[0].startswith(
            "with its arguments it takes 4,194,305 bytes, more than max_replay_bytes=4194304"
        )
        assert _refusals(pool)[1] == ""


def _of(pool: sky.ComputePool) -> list[tuple[FailedCall, Path]]:
    return next(failed_calls.kept(entry) for entry in entries() if entry.pool == pool.name)


def _sizes(pool: sky.ComputePool) -> list[int]:
    until(lambda: _of(pool))
    return [each.size for each, _ in _of(pool)]


def _refusals(pool: sky.ComputePool) -> list[str]:
    return [each.refused for each, _ in _of(pool)]


def test_the_newest_calls_are_kept_if_all_are_too_many(pool: sky.ComputePool) -> None:
    for number in range(6):
        failed(fail(bytes([number]) * LARGE), pool)
    pool.close()
    found = kept()
    assert sum(each.size for each, _ in found) <= LIMIT
    assert len(found) == 3
    assert len(list(found[0][1].parent.glob("*.data"))) == 3 + 1  # what they share
    for each in found:
        failed_calls.load(*each)


def test_the_same_large_argument_is_kept_once(pool: sky.ComputePool) -> None:
    table = os.urandom(LARGE)
    for _ in range(2):
        failed(fail(table), pool)
    pool.close()
    assert len(kept()) == 2
    assert len(list(kept()[0][1].parent.glob("*.data"))) == 1 + 1


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize("where", ["argument", "inside", "closure", "text", "large"])
def test_no_call_that_holds_a_secret_is_kept(pool: sky.ComputePool, state: Path, where: str) -> None:
    """SEC-36."""
    secret = sky.Secret(CANARY)

    @sky.compute
    def with_closure() -> None:
        raise ValueError(type(secret))

    call = {
        "argument": fail(secret),
        "inside": fail(Holder([secret])),
        "closure": with_closure(),
        "text": fail(f"https://me:{CANARY}@host"),
        "large": fail(bytes(LARGE) + CANARY.encode() + bytes(LARGE)),
    }[where]
    error = failed(call, pool)
    if where != "large":  # a file, which is looked through after the error was raised
        assert "sky replay" not in "".join(getattr(error, "__notes__", ()))
    pool.close()
    assert one()[0].refused == "its function or its arguments hold a sky.Secret"
    assert CANARY.encode() not in contents(state)
    with pytest.raises(InvalidArgument, match="cannot be run again: its function or its arguments hold a"):
        failed_calls.load(*one())


def test_secrets_of_image_and_plugins_are_left_out(state: Path) -> None:
    """SEC-36."""
    secret = sky.Secret(CANARY)
    plugin = sky.Plugin.create("mine").with_decorator(lambda fn: (secret, fn)[1])
    env: dict[str, str | sky.Secret] = {"PLAIN": "1", "HIDDEN": secret, "MY_TOKEN": "abc"}
    env["ADDRESS"] = f"https://me:{CANARY}@host"
    with sky.ComputePool(console=False, image=sky.Image(env=env), plugins=[plugin]) as pool:
        failed(fail(1), pool)
    shared = pool_of(*one())
    assert dict(pickle.loads(shared.image).env) == {"PLAIN": "1"}
    assert shared.secret_variables == ["ADDRESS", "HIDDEN", "MY_TOKEN"]
    assert (shared.hooks, shared.left_out) == ([], ["mine"])
    assert CANARY.encode() not in contents(state)


def test_an_iterator_and_a_result_on_a_node_cannot_be_kept(pool: sky.ComputePool) -> None:
    @sky.compute
    def read(items: Iterator[int]) -> None:
        raise ValueError(next(items))

    @sky.compute
    def make() -> int:
        return 1

    failed(read(iter([1, 2])), pool)
    failed(fail(make().keep() >> pool), pool)
    pool.close()
    assert [each.refused for each, _ in kept()] == [
        "it took a result that stays on a node",
        "an argument of it was an iterator, which can be read once",
    ]


@pytest.mark.parametrize("option", [{"history": False}, {"max_replay_bytes": 0}])
def test_the_options_that_turn_it_off_keep_nothing(state: Path, option: dict[str, Any]) -> None:
    with sky.ComputePool(console=False, **option) as pool:
        error = failed(fail(1), pool)
    assert "sky replay" not in "".join(error.__notes__)
    assert not list(state.rglob("failed"))


@pytest.mark.parametrize("limit", [-1, True, "1 GB", 0.5])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_replay_bytes"):
        sky.ComputePool(max_replay_bytes=limit)


def test_two_pools_keep_their_own_calls(state: Path) -> None:
    with sky.ComputePool(console=False) as one, sky.ComputePool(console=False) as other:
        failed(fail(1), one)
        failed(fail(2), other)
    assert sorted(entry.pool for entry in entries() if list(failed_calls.kept(entry))) == sorted([one.name, other.name])
    assert len({each.id for each, _ in kept()}) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "large", "pool", "no large", "no pool"])
def test_damage_is_told_and_never_run(pool: sky.ComputePool, damage: str) -> None:
    failed(fail(bytes(2 * LARGE)), pool)
    pool.close()
    call, file = one()
    *_, large, shared = (file.with_name(f"{call.files[index]}.data") for index in sorted(call.files, key=int))
    path = {"large": large, "no large": large, "pool": shared, "no pool": shared}.get(damage, file)
    if damage.startswith("no "):
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data[:-1] if damage == "cut" else data)
    with pytest.raises(InvalidArgument, match="what was kept of this call is damaged"):
        failed_calls.load(call, file)


def test_a_call_is_found_by_the_beginning_of_its_id_if_there_is_only_one(pool: sky.ComputePool) -> None:
    failed(fail(1), pool)
    failed(fail(2), pool)
    pool.close()
    first, second = sorted(each.id for each, _ in kept())
    assert failed_calls.find(first)[0].id == first
    with pytest.raises(InvalidArgument, match=f"2 failed calls begin with '{first[:4]}': "):
        failed_calls.find(first[:4])
    with pytest.raises(InvalidArgument, match="no failed call '0000-nothing' is kept on this computer"):
        failed_calls.find("0000-nothing")
    with pytest.raises(InvalidArgument, match="no failed call '' is kept"):
        failed_calls.find("")
    assert second
