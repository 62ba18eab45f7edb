"""What a host says of itself, read and judged: tables of lines and of what a user is told."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import HostUnreachable
from skyward.setup.checks.findings import (
    Clock,
    Facts,
    Finding,
    Reached,
    agreement,
    cleaned,
    clock,
    facts_of,
    network_of,
    not_reached,
    printable,
    read,
)

HEALTHY = (
    "system Linux 6.8.0 x86_64\tglibc 2.39\tUbuntu 24.04",
    "platform x86_64-manylinux_2_34",
    "user ada",
    "cpus 16",
    "load 0.31",
    "memory 64000000 60000000",
    "cache /home/ada/.cache/skyward",
    "files 1048576",
    "python 3.12.3 /usr/bin/python3.12",
    "uv /home/ada/.local/bin/uv",
    "shm 32000000",
    "room 500000000 /home/ada",
    "gpu NVIDIA A100-SXM4-80GB, 81920, 3, 550.54.14",
    "gpu NVIDIA A100-SXM4-80GB, 81920, 3, 550.54.14",
    "logind no no",
    "index-ok https://pypi.org/simple/",
    "done /usr/bin/python3.12",
)


def kind(line: str) -> str:
    return line.partition(" ")[0].partition("-")[0]


def facts(*changed: str) -> Facts:
    """A healthy host, but for these lines: a line replaces all of its kind, `-kind` removes them."""
    kinds = {kind(line.removeprefix("-")) for line in changed}
    kept = [line for line in HEALTHY if kind(line) not in kinds]
    lines = [*kept, *(line for line in changed if not line.startswith("-"))]
    return read((word, rest) for word, _, rest in (line.partition(" ") for line in lines))


def told(*changed: str, python: tuple[int, int] = (3, 12)) -> list[Finding]:
    return list(facts_of("h", facts(*changed), python))


def test_a_healthy_host_has_nothing_to_complain_of() -> None:
    found = told()
    assert {finding.state for finding in found} == {"ok"}
    texts = {finding.what: finding.text for finding in found}
    assert texts["python"] == "Python 3.12.3 at /usr/bin/python3.12"
    assert texts["disk"] == "477 GB free in /home/ada, where environments are made"
    assert texts["gpus"] == "2 x NVIDIA A100-SXM4-80GB (80 GB), driver 550.54.14"
    assert "Ubuntu 24.04" in texts["system"]


CASES = [
    ("platform ", "system", "problem", "Linux on x86_64 or aarch64"),
    ("problem system this is Darwin arm64; a host needs Linux on x86_64 or aarch64.", "system", "problem", "Darwin"),
    ("problem tool there is no tar. Install it.", "programs", "problem", "there is no tar"),
    ("problem files this user may have no more than 256 open files", "limits", "problem", "256 open files"),
    ("problem disk /home has 9 MB free; 292 MB are needed.", "disk", "problem", "292 MB are needed"),
    ("problem noexec programs in /home/ada/.cache/skyward cannot be run", "disk", "problem", "cannot be run"),
    ("room 2000000 /home/ada", "disk", "warning", "1.9 GB free in /home/ada"),
    ("room  /home/ada", "disk", "warning", "not known"),
    ("load 99.5", "system", "warning", "keeps it busy"),
    ("memory 64000000 200000", "memory", "warning", "195 MB of 61.0 GB"),
    ("shm 65536", "shm", "warning", "--shm-size"),
    ("python 3.9.2 /usr/bin/python3", "python", "ok", "no Python 3.12 that works (there is 3.9.2); uv brings one"),
    ("-python", "python", "ok", "no Python 3.12 that works; uv brings one"),
    ("index-failed https://pypi.org/simple/\tcurl: (28) timed out", "packages", "warning", "fetched by this computer"),
    ("index-unknown https://pypi.org/simple/", "packages", "ok", "could not be tried"),
    ("gpu-failed 9 NVIDIA-SMI has failed because it could not talk to the driver", "gpus", "problem", "could not talk"),
    ("gpu NVIDIA T4, 15360, 9000, 535.1", "gpus", "warning", "GPU 0 has 8.8 GB in use"),
    ("-gpu", "gpus", "ok", "none"),
    ("pool bob sweep-3-1a2b-Xy12", "in use", "warning", "sweep-3-1a2b-Xy12 of user bob"),
    ("logind yes no", "logind", "warning", "loginctl enable-linger ada"),
]


@pytest.mark.parametrize(("line", "what", "state", "words"), CASES, ids=[case[0][:24].strip() for case in CASES])
def test_what_a_line_means(line: str, what: str, state: str, words: str) -> None:
    found = [finding for finding in told(line) if finding.what == what]
    assert [finding.state for finding in found] == [state]
    assert words in f"{found[0].text}. {found[0].do}"
    others = [finding for finding in told(line) if finding.what != what]
    assert {finding.state for finding in others} == {"ok"}


def test_a_host_without_python_and_without_an_index_is_a_warning() -> None:
    found = {finding.what: finding for finding in told("-python", "index-failed https://pypi.org/simple/\tno route")}
    assert found["python"].state == "warning"
    assert "sends it" in found["python"].do


def test_linger_keeps_processes_and_so_there_is_nothing_to_say() -> None:
    assert "logind" not in {finding.what for finding in told("logind yes yes")}


def test_every_finding_that_is_not_right_says_what_to_do() -> None:
    for line, _, _, _ in CASES:
        for finding in told(line):
            assert finding.state == "ok" or finding.do or line.startswith("problem")  # those words say it themselves


@pytest.mark.parametrize(
    ("offset", "uncertain", "state", "words"),
    [
        (0.004, 0.001, "ok", "within 5.0 ms"),
        (1.4, 0.6, "ok", "within 2.0 s"),
        (-90.0, 0.01, "warning", "90.0 s behind this computer's"),
        (7300.0, 0.01, "warning", "2.0 h ahead of this computer's"),
        (-90_000.0, 0.01, "problem", "certificates of a pool are not valid there"),
    ],
)
def test_a_clock_that_is_off(offset: float, uncertain: float, state: str, words: str) -> None:
    found = clock("h", Clock(offset, uncertain))
    assert found.state == state
    assert words in found.text
    assert (state == "ok") == (not found.do)


def test_a_host_that_does_not_know_the_time_is_a_warning() -> None:
    assert clock("h", None).state == "warning"


def test_hosts_that_cannot_reach_each_other_are_a_warning_and_for_a_mesh_a_problem() -> None:
    peers = [Reached("h1", "10.0.0.2", "", 0.0003, 1.2e8), Reached("h2", "10.0.0.3", "no answer within 3 s")]
    loose = list(network_of("h0", "10.0.0.1 (eth0)", peers, required=False))
    assert [finding.state for finding in loose] == ["warning", "ok"]
    assert loose[0].text == "cannot connect to h2 (10.0.0.3): no answer within 3 s"
    assert "groups of nodes (torch, jax) do not" in loose[0].do
    assert loose[1].text == "from 10.0.0.1 (eth0) it connects to h1 (10.0.0.2, 0.3 ms, 960 Mbit/s)"
    assert next(network_of("h0", "10.0.0.1 (eth0)", peers, required=True)).state == "problem"


def test_hosts_that_are_not_alike_are_told_apart() -> None:
    older = facts("gpu NVIDIA A100-SXM4-80GB, 81920, 3, 535.1", "gpu NVIDIA A100-SXM4-80GB, 81920, 3, 535.1")
    assert not list(agreement({"a": facts(), "b": facts()}))
    assert [finding.what for finding in agreement({"a": facts(), "b": older})] == ["driver"]
    assert [finding.what for finding in agreement({"a": facts(), "b": facts("-gpu")})] == ["gpus"]
    (arms,) = agreement({"a": facts(), "b": facts("platform aarch64-manylinux_2_34")})
    assert arms.text == "they differ: x86_64 on a; aarch64 on b"
    assert arms.host == "all 2 hosts"


def test_why_ssh_does_not_get_in_is_told_in_one_line() -> None:
    detail = "it did not answer in time.\nssh said: x timed out\nTo try by hand: ssh gpu1 true"
    error = HostUnreachable("ssh gpu1", detail)
    found = cleaned(not_reached("gpu1", error))
    assert (found.what, found.state) == ("ssh", "problem")
    assert found.text == "it did not answer in time. ssh said: x timed out"
    assert found.do == "To try by hand: ssh gpu1 true"


EVIL = "\x1b]0;owned\x07\x1b[2J\r\n\u202eevil\x9b31m\x00" + "x" * 5000


def test_nothing_that_a_host_says_acts_on_the_terminal_or_is_without_end() -> None:
    """SEC-35."""
    words = {line.partition(" ")[0] for line in HEALTHY} | {"problem", "pool", "gpu-failed", "index-failed", "amd"}
    for word in words:
        for finding in facts_of("h", read([(word, EVIL), (word, f"1 {EVIL}"), (word, f"{EVIL}\t{EVIL}")]), (3, 12)):
            assert f"{finding.text}{finding.do}".isprintable(), (word, finding)
            assert len(finding.text) < 3000
    hostile = cleaned(Finding(EVIL, "ssh", "problem", EVIL, EVIL))
    assert (hostile.host + hostile.text + hostile.do).isprintable()


def test_a_host_that_says_the_same_thing_a_million_times_is_not_repeated() -> None:
    """SEC-35."""
    for word in ("gpu", "pool", "python", "problem", "index-ok"):
        lines = itertools.islice(((word, f"{number} {number}") for number in itertools.count()), 20_000)
        assert len(list(facts_of("h", read(lines), (3, 12)))) < 200


@given(st.lists(st.tuples(st.sampled_from([line.partition(" ")[0] for line in HEALTHY]), st.text(max_size=40))))
def test_no_line_of_a_host_is_an_error(lines: list[tuple[str, str]]) -> None:
    for finding in facts_of("h", read(lines), (3, 12)):
        assert finding.text.isprintable()


def test_long_texts_are_shortened() -> None:
    assert len(printable("a" * 10_000)) == 300
    assert printable("two\nlines\tand\x07 more") == "two lines and more"
