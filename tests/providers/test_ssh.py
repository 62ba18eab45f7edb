"""The user's own hosts as a provider: what is said about them is checked before anything is tried."""

from __future__ import annotations

import pickle
import subprocess
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from skyward.api.provider import Machine
from skyward.api.shell import Access, SshTarget
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.providers.local import Local
from skyward.providers.ssh import SSH, parse_host


@pytest.fixture
def key(tmp_path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "id")], check=True)
    return tmp_path / "id"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gpu1", (None, "gpu1", None)),
        ("gpu1.lab.example", (None, "gpu1.lab.example", None)),
        ("user@10.0.0.7:2222", ("user", "10.0.0.7", 2222)),
        ("10.0.0.7:22", (None, "10.0.0.7", 22)),
        ("[2001:db8::1]:22", (None, "2001:db8::1", 22)),
        ("[2001:db8::1]", (None, "2001:db8::1", None)),
        ("me@2001:db8::1", ("me", "2001:db8::1", None)),
        ("fe80::1%eth0", (None, "fe80::1%eth0", None)),
        ("ssh://user@host:2200", ("user", "host", 2200)),
        ("ssh://host/", (None, "host", None)),
        ("ssh://me%40corp@[::1]:22", ("me@corp", "::1", 22)),
        ("me@corp.example@bastion", ("me@corp.example", "bastion", None)),
        ("my_alias-2", (None, "my_alias-2", None)),
    ],
)
def test_hosts_are_read_as_ssh_users_write_them(text: str, parts: tuple[str | None, str, int | None]) -> None:
    assert parse_host(text) == parts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("user@", "names no host"),
        ("@host", "names no user"),
        ("ssh://", "names no host"),
        ("host:", "'' is not a port"),
        ("host:ssh", "'ssh' is not a port"),
        ("host:0", "from 1 to 65535"),
        ("host:65536", "from 1 to 65535"),
        ("host:-1", "from 1 to 65535"),
        ("[::1]:x", "'x' is not a port"),
        ("-oProxyCommand=touch", "take it for an option"),
        ("-l@host", "take it for an option"),
        ("user@-host", "take it for an option"),
        ("gpu1 gpu2", "Write one host per entry"),
        ("gpu1\n", "cannot have '\\n'"),
        ("$(touch x)", "cannot have '$'"),
        ("`id`", "cannot have '`'"),
        ("a;b", "cannot have ';'"),
        ("ssh://host/path", "holds a path"),
    ],
)
def test_what_is_no_host_is_refused_in_words(text: str, words: str) -> None:
    """SEC-16: nor can a host become an option of ssh or a word of a shell."""
    with pytest.raises(InvalidArgument) as caught:
        SSH([text])
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": "gpu1"}, "hosts=['gpu1']"),
        ({"hosts": SshTarget("gpu1")}, "hosts=['gpu1']"),
        ({"hosts": []}, "at least one host"),
        ({"hosts": None}, "expected a list"),
        ({"hosts": {"gpu1"}}, "expected a list"),
        ({"hosts": ["gpu1"], "key": 3}, "not the path"),
        ({"hosts": ["gpu1,gpu2"]}, "one host per entry"),
        ({"hosts": [1]}, "1 is not a host"),
        ({"hosts": [SshTarget("")]}, "is not a host"),
        ({"hosts": [SshTarget("-oProxyCommand=x")]}, "take it for an option"),
        ({"hosts": [SshTarget("a", user="-x")]}, "take it for an option"),
        ({"hosts": ["gpu1", "gpu2", "gpu1"]}, "'gpu1' is named twice"),
        ({"hosts": ["gpu1", "me@GPU1"]}, "named twice"),
        ({"hosts": ["gpu1", "gpu1:22"], "port": 22}, "'gpu1:22' is named twice"),
        ({"hosts": ["gpu1"], "port": 0}, "not a port"),
        ({"hosts": ["gpu1"], "port": "many"}, "not a port"),
        ({"hosts": ["gpu1"], "user": "-x"}, "take it for an option"),
        ({"hosts": ["gpu1"], "user": "a b"}, "cannot have ' '"),
        ({"hosts": ["gpu1"], "user": ""}, "name of a user"),
        ({"hosts": ["gpu1"], "host_keys": "no"}, "strict, accept-new"),
        ({"hosts": ["gpu1"], "network": "ring"}, "auto, mesh, star"),
        ({"hosts": ["gpu1"], "ssh_timeout": 0}, "ssh_timeout=0"),
        ({"hosts": ["gpu1"], "lease": -1}, "lease=-1"),
        ({"hosts": ["gpu1"], "known_hosts": "/no/such/file"}, "cannot be read"),
        ({"hosts": ["gpu1"], "known_hosts": '/a"b', "host_keys": "accept-new"}, "double quote"),
        ({"hosts": ["gpu1"], "key": "/no/such/key"}, "No such file"),
        ({"hosts": ["gpu1"], "key": "/tmp"}, "directory"),
        ({"hosts": ["gpu1"], "key": "/dev/null"}, "no private key"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SSH(**given)
    assert words in str(caught.value)


def test_a_key_that_ssh_would_not_use_is_refused(key: Path) -> None:
    assert SSH(["gpu1"], key=key).targets[0].key == str(key)
    with pytest.raises(InvalidArgument, match=r"is a public key.*key='.*/id'"):
        SSH(["gpu1"], key=f"{key}.pub")
    key.chmod(0o644)
    with pytest.raises(InvalidArgument, match=f"chmod 600 {key}"):
        SSH(["gpu1"], key=key)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        SSH([SshTarget("gpu1", key=str(key))])


def test_what_a_host_does_not_say_is_taken_from_the_provider(
    key: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "known").touch()
    hosts = ["gpu1", "root@gpu2:23", SshTarget("gpu3", port=24, config=False)]
    found = SSH(hosts, user="me", port=2222, key="~/id", known_hosts="~/known").targets
    common = {"key": str(key), "known_hosts": str(tmp_path / "known")}
    assert found == (
        SshTarget("gpu1", "me", 2222, **common),
        SshTarget("gpu2", "root", 23, **common),
        SshTarget("gpu3", "me", 24, config=False, **common),
    )
    assert SSH(["gpu1"], host_keys="accept-new").targets == (SshTarget("gpu1", host_keys="accept-new"),)


def test_nodes_are_the_first_hosts_and_no_more_than_there_are() -> None:
    provider = SSH(["gpu1", "me@gpu2:23", "[2001:db8::1]:22"])
    assert provider.default_nodes == 3
    assert Local().default_nodes == 1
    (offer,) = provider.offers(Spec(), 3)
    assert (offer.name, offer.hourly_cost) == ("3 hosts", 0.0)
    assert SSH(["gpu1"]).offers(Spec(), 1) == [type(offer)("1 host")]
    holding = provider.acquire(Spec(), "pool", 2, 1.0, print)
    assert holding.machines == (
        Machine("gpu1", ssh=SshTarget("gpu1")),
        Machine("me@gpu2:23", ssh=SshTarget("gpu2", "me", 23)),
    )
    assert provider.acquire(Spec(), "pool", 3, 1.0, print).machines[2].id == "[2001:db8::1]:22"
    for ask in (lambda: provider.offers(Spec(), 4), lambda: provider.acquire(Spec(), "pool", 4, 1.0, print)):
        with pytest.raises(InvalidArgument, match=r"nodes=4, but SSH names 3 host\(s\): gpu1, me@gpu2:23, "):
            ask()


def test_it_is_a_frozen_value_with_a_short_repr() -> None:
    provider = SSH(["gpu1", "gpu2"], user="me", lease=60)
    assert repr(provider) == "SSH(hosts=['gpu1', 'gpu2'], user='me', lease=60)"
    assert repr(SSH([f"gpu{n}" for n in range(9)])) == "SSH(hosts=['gpu0', 'gpu1', 'gpu2', ... 6 more])"
    assert provider == SSH(("gpu1", "gpu2"), user="me", lease=60)
    assert hash(provider) == hash(SSH(("gpu1", "gpu2"), user="me", lease=60))
    assert pickle.loads(pickle.dumps(provider)) == provider
    assert provider.access == Access(lease=60, ssh_timeout=60.0, network="auto", detaches=True, stays=True)
    with pytest.raises(FrozenInstanceError):
        provider.user = "other"  # pyright: ignore[reportAttributeAccessIssue]
