"""Ledgers are read as hostile input: whatever stands in one, it is damaged or harmless (SEC-21)."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skyward as sky
from skyward.machines import ledger as ledger_module
from skyward.machines.ledger import Ledger, Record, line, parsed, pool_dir, read

GOOD: dict[str, Any] = {"fact": "open", "call": "c", "kind": "k", "ids": ["i-1"], "time": 1.5, "data": {"region": "x"}}


def signed(text: bytes) -> bytes:
    """A line whose checksum is right: it is no secret how that is made."""
    return blake2b(text, digest_size=8).hexdigest().encode() + b" " + text


def told(**changed: Any) -> bytes:
    return signed(json.dumps({**GOOD, **changed}).encode())


def test_what_we_write_is_what_we_read() -> None:
    data = {"region": "us-east-1", "token": "t", "count": 3, "price": 0.5, "pace": {"poll": 1.0}, "ssh_from": None}
    record = Record("intent", "1-2", "instance", ("i-1", "i-2"), 1700000000.5, data)
    assert parsed(line(record).rstrip(b"\n")) == record
    assert parsed(told()) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"fact": "other"}, {"fact": ["open"]}, {"fact": None}, {"call": 3}, {"kind": {}}, {"ids": "i-1"}, {"ids": [3]},
        {"ids": [["i"]]}, {"ids": None}, {"time": "now"}, {"time": True}, {"time": 1e300}, {"data": []}, {"data": None},
        {"data": {"region": 3}}, {"data": {"region": "evil.example/#"}}, {"data": {"region": ""}},
        {"data": {"region": "a\\n"}}, {"data": {"provider": ["AWS"]}}, {"data": {"provider": {"a": 1}}},
        {"data": {"expires": "never"}}, {"data": {"expires": [1]}}, {"data": {"pid": {}}}, {"data": {"pid": "1"}},
        {"data": {"host": "x\x1b[2Jy"}}, {"data": {"owner": 3}}, {"data": {"endpoint_url": ["http://x"]}},
        {"data": {"price": "1"}}, {"data": {"profile": {}}}, {"call": "x\ny"},
    ],
)  # fmt: skip
def test_a_line_with_anything_else_in_it_is_damaged(changed: dict[str, Any]) -> None:
    """SEC-21."""
    assert parsed(told(**changed)) is None


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"fact": "open", "time": NaN}', b"1" * 100_000, b'{"fact":"open"}',
    ],
)  # fmt: skip
def test_what_is_no_record_at_all_is_damaged(text: bytes) -> None:
    """SEC-21: the attack that worked: RecursionError and TypeError came out of `sky ps`."""
    assert parsed(signed(text)) is None
    assert parsed(text) is None


def test_numbers_that_are_none_are_damaged() -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 400):
        text = json.dumps(GOOD).replace("1.5", number).encode()
        assert parsed(signed(text)) is None


def test_a_line_that_is_too_long_is_damaged_without_being_read() -> None:
    assert parsed(told(call="x" * 1000)) is not None
    assert parsed(told(call="x" * (2 << 20))) is None


@settings(max_examples=300, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=12,
    ),
    where=st.sampled_from([*GOOD, "provider", "region", "expires", "pid", "host", "owner", "pace", "volumes"]),
)
def test_no_value_anywhere_makes_reading_fail(tmp_path_factory: pytest.TempPathFactory, value: Any, where: str) -> None:
    """SEC-21."""
    changed = {where: value} if where in GOOD else {"data": {where: value}}
    found = parsed(told(**changed))
    if found is not None:
        assert isinstance(found.data, dict)
        assert all(isinstance(id, str) for id in found.ids)
        assert found.data.get("provider") is None or isinstance(found.data["provider"], str)


def test_an_endless_file_is_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(ledger_module, "_MOST", 10_000)
    Ledger.start("p", {"provider": "AWS"}).let_go()
    with (pool_dir("p") / "ledger").open("ab") as file:
        file.write(b"x" * 50_000)
    found = read("p")
    assert found is not None
    assert found.damaged == 1
    assert found.metadata["provider"] == "AWS"


def test_a_secret_cannot_be_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-9."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    ledger = Ledger.start("p", {"provider": "AWS"})
    with pytest.raises(TypeError, match="not JSON serializable"):
        ledger.note(token=sky.Secret("canary-in-a-ledger"))
    assert b"canary" not in (pool_dir("p") / "ledger").read_bytes()
    ledger.remove()
