"""What indexes and hosts say does not decide where files are written, nor what is run (SEC-16, SEC-19)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.api.image import Image
from skyward.api.shell import Finished
from skyward.errors import BootstrapError
from skyward.setup.env.remote import Packages, fetch, prepare_host
from skyward.setup.env.requirements import check_digest, check_platform, file_name
from skyward.setup.local_shell import LocalShell
from tests.support.indexes import Index

HOSTILE = [
    "..%2F..%2Fpwned.whl",
    "..%2f..%2f..%2fpwned.tar.gz",
    "%2Ftmp%2Fpwned.whl",
    "..",
    ".",
    "",
    ".hidden.whl",
    "a%00.whl",
    "a%0A.whl",
    "a%20b.whl",
    "$(id).whl",
    "a,b.whl",
    "a.whl%3Fx",
    "a.sh",
    f"{'a' * 300}.whl",
]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index")
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_an_index_stays_where_it_is_kept(index: Index, tmp_path: Path, name: str) -> None:
    """SEC-16: the server may call it what it likes: `..%2F` in an address is no way out of the cache."""
    content = b"hostile"
    kept = tmp_path / "cache" / "wheels" / "0123456789abcdef"
    before = sorted(tmp_path.rglob("*"))
    url = f"{index.address}/simple/x/{name}"
    with pytest.raises(BootstrapError, match="is not the file name of a package"):
        fetch(url, hashlib.sha256(content).hexdigest(), kept, {}, None, time.monotonic() + 5)
    assert sorted(tmp_path.rglob("*")) == before
    assert index.seen == []


@pytest.mark.parametrize(
    "name",
    [
        "a-1.0-py3-none-any.whl",
        "torch-2.6.0%2Bcu124-cp311-cp311-manylinux_2_28_x86_64.whl",
        "a.b-1!2.tar.gz",
        "a-1.zip",
    ],
)
def test_names_of_packages_are_accepted(name: str) -> None:
    assert "/" not in file_name(f"https://index.example.org/x/{name}", "a step")


@given(st.text())
def test_whatever_an_index_says_a_name_is_one_plain_file(name: str) -> None:
    try:
        found = file_name(f"https://index.example.org/x/{name}", "a step")
    except (BootstrapError, ValueError):
        return
    assert Path("/kept", found).parent == Path("/kept")
    assert found.isascii()
    assert not found.startswith((".", "-"))


@pytest.mark.parametrize("digest", ["", "../" * 21 + "x", "A" * 64, "g" * 64, "1" * 63, "1" * 65])
def test_a_hash_is_digits_before_it_is_a_path(digest: str) -> None:
    with pytest.raises(BootstrapError, match="not a SHA-256"):
        check_digest(digest, "a step")


class Liar(LocalShell):
    """A host that says what it is told to say."""

    def __init__(self, **facts: str) -> None:
        self.facts = facts

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        token = argv[4] if len(argv) > 4 else ""
        said = {"platform": "x86_64-manylinux_2_28", "path": "/bin", "cache": "/home/me/c", **self.facts}
        return Finished(0, "".join(f"@{token} {name} {value}\n" for name, value in said.items()).encode(), "")


@pytest.mark.parametrize(
    "facts",
    [
        {"platform": "../../../../pwned", "stage": "/home/me/c/stage/x"},
        {"platform": "/no/such/place", "stage": "/home/me/c/stage/x"},
        {"platform": "x86_64-manylinux_2_28/../x", "stage": "/home/me/c/stage/x"},
        {"platform": "--index-url=https://evil", "stage": "/home/me/c/stage/x"},
        {"platform": "", "stage": "/home/me/c/stage/x"},
        {"cache": "relative", "stage": "relative/stage/x"},
        {"cache": "/a\tb", "stage": "/a\tb/stage/x"},
        {"stage": "/home/me"},
        {"stage": "/home/me/c/stage/../../.ssh"},
        {"stage": "/home/me/c/stage/.."},
        {"ready": "/home/me/c/envs/k\t/home/me"},
        {"ready": "/home/me/c/envs/k\t/home/me/c/pools/../.."},
        {"ready": "/elsewhere/envs/k\t/home/me/c/pools/p"},
    ],
    ids=str,
)
def test_what_a_host_says_of_itself_is_no_path_before_it_is_checked(
    facts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-16: platforms name files of the cache here, and are options of programs; directories are removed."""
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
    image = Image()
    with pytest.raises(BootstrapError, match="do not use this host"):
        prepare_host(
            Liar(**facts), image, pool="p", deadline=time.monotonic() + 60,
            report=lambda step, took: None, packages=Packages(image),
        )  # fmt: skip
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("libc", ["manylinux_2_17", "manylinux_2_28", "manylinux_2_34", "unknown-linux-musl"])
def test_platforms_of_hosts_are_accepted(arch: str, libc: str) -> None:
    check_platform(f"{arch}-{libc}", "a host", "a step")
