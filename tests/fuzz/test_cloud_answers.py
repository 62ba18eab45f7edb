"""Answers of a cloud that are cut, garbled or lack fields are errors that say so, and leave nothing behind."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.errors import SkywardError
from tests.fuzz.conftest import SECONDS
from tests.support.cloud import Cloud

ROUNDS = SECONDS // 5 or 12  # more than a second each
ACTIONS = ["DescribeInstanceTypes", "DescribeInstances", "DescribeImages", "DescribeSubnets", "RunInstances", "*"]


def garbled(body: bytes, seed: int) -> bytes:
    """The answer with a few faults of one kind, the same ones for the same seed."""
    chance = random.Random(seed)
    how = chance.choice(["cut", "bytes", "drop", "empty", "deep", "other"])
    if how == "cut":
        return body[: chance.randrange(len(body) + 1)]
    if how == "bytes":
        changed = bytearray(body)
        for _ in range(chance.randrange(1, 8)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)
    if how == "drop":  # one kind of field is missing everywhere
        names = re.findall(rb"<(\w+)>[^<]*</\1>", body) or [b"none"]
        return re.sub(rb"<(%s)>[^<]*</\1>" % chance.choice(names), b"", body)
    if how == "empty":
        return chance.choice([b"", b"{}", b"[]", b"null", b"<a/>"])
    if how == "deep":
        return b"<a>" * 5_000 if body.startswith(b"<") else b"[" * 5_000
    return re.sub(rb">[^<]+<", b">\xc3\xa9\x00 1e999<", body)


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud() as opened:
        yield opened


def test_garbled_answers_end_in_errors_that_say_so(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SEC-7."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))
    for name, value in cloud.environ.items():
        monkeypatch.setenv(name, value)
    spec = sky.Spec(nodes=1, vcpus=2)
    for seed in range(ROUNDS):
        action = ACTIONS[seed % len(ACTIONS)]
        cloud.faults.clear()
        cloud.fail(action, mode="garble", times=2, skip=seed % 3, garble=lambda body, seed=seed: garbled(body, seed))
        provider = cloud.aws()
        pool = f"garbled-{seed}"
        try:
            list(provider.offers(spec, 1))
            provider.acquire(spec, pool, 1, 5.0, lambda *_: None).let_go()
        except SkywardError:
            pass
        cloud.fail("*", mode="garble", times=1, garble=lambda body, seed=seed: garbled(body, seed + 1))
        try:
            provider.give_back(pool, lambda *_: None)
        except SkywardError:
            pass
        cloud.faults.clear()
        cloud.aws().give_back(pool, lambda *_: None)
    assert cloud.leftovers() == []
