"""A run on this computer with secrets in every place: what is shown, said, written or seen of them is nothing."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest

import skyward as sky

TAG = f"canary{secrets.token_hex(8)}"
WATCH = """
import os, select, sys
seen = set()
while not select.select([0], [], [], 0.005)[0]:
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            for name in ("cmdline", "comm", "status"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        seen.add(file.read())
                except OSError:
                    pass
sys.stdout.buffer.write(b"\\x01".join(seen))
"""


@sky.compute
def use(token: sky.Secret, how: str) -> tuple[str, str, int]:
    """Does with a secret what careless bodies do."""
    text = token.reveal()
    if how == "print":
        print("plain", text, "and", [text], json.dumps({"token": text}), token, [token], flush=True)
        half = len(text) // 2
        print("in two parts", text[:half], end="", flush=True)
        print(text[half:])
        os.write(1, f"by C {text} code\n".encode())
        os.write(2, f"bar {text} 10%\rbar {text} 20%\r".encode())
        subprocess.run(["sh", "-c", "echo by a program $TAG_VARIABLE"], check=True)
        logging.getLogger("body").error("logged %s", text)
        print(os.environ["TAG_VARIABLE"], end="")
    elif how == "raise":
        try:
            raise KeyError(text)
        except KeyError as exc:
            error = ValueError(f"the server refused {text}", {"token": token})
            error.add_note(f"tried {text}")
            raise error from exc
    elif how == "crash":
        print(f"dying with {text}", file=sys.stderr, flush=True)
        os._exit(3)
    return type(token).__name__, repr(token), len(text)


@dataclass
class Seen:
    """What was said and could be seen of a pool, and what it is."""

    pool: sky.ComputePool
    printed: StringIO
    said: list[str] = field(default_factory=list[str])
    commands: list[str] = field(default_factory=list[str])


@contextmanager
def watched(found: list[str]) -> Generator[None]:
    """Collects what every user of this computer can see of its processes."""
    pipe = subprocess.PIPE
    watcher = subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCH], stdin=pipe, stdout=pipe, env={})
    try:
        yield
    finally:
        found += watcher.communicate(b"\n")[0].replace(b"\0", b" ").decode("utf-8", "replace").split("\x01")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A pool that got secrets in every way, and bodies that show them."""
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("SKYWARD_STATE", str(state))
        patch.setenv("TAG_FROM_ENV", f"{TAG}-argument")
        image = sky.Image(env={"TAG_VARIABLE": sky.Secret(f"{TAG}-env"), "HF_PAT": f"{TAG}-named"})
        pool = sky.ComputePool(nodes=2, image=image, console="plain")
        found = Seen(pool, stack.enter_context(redirect_stdout(StringIO())))
        stack.enter_context(redirect_stderr(found.printed))
        handler = logging.Handler(logging.DEBUG)
        handler.emit = lambda record: found.said.append(logging.Formatter().format(record))
        root, level = logging.getLogger(), logging.getLogger().level
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        stack.callback(root.removeHandler, handler)
        stack.callback(root.setLevel, level)
        pool.on_event(lambda event: found.said.append(repr(event)))
        stack.enter_context(watched(found.commands))
        with pool:
            found.said.append(repr(pool))
            yield found
            assert TAG not in "".join(str(dict(os.environ))).replace(f"{TAG}-argument", "")


@pytest.fixture
def token() -> sky.Secret:
    return sky.Secret.from_env("TAG_FROM_ENV")


def test_a_call_gets_a_secret_as_a_secret(seen: Seen, token: sky.Secret) -> None:
    """SEC-9: as an argument, and as a variable."""
    assert use(token, "") >> seen.pool == ("Secret", "Secret('***')", len(TAG) + 9)

    @sky.compute
    def variable() -> bool:
        return os.environ["TAG_VARIABLE"].endswith("-env")

    assert (variable() @ seen.pool) == [True, True]


def test_what_a_body_prints_comes_home_without_the_secret(seen: Seen, token: sky.Secret) -> None:
    """SEC-9: in one piece or several, by Python, C or another program, in lines and in progress bars."""
    before = len(seen.said)
    use(token, "print") @ seen.pool
    events = "\n".join(line for line in seen.said[before:] if line.startswith("Output("))
    for expected in ("plain *** and", "in two parts ***", "by C *** code", "bar *** 20%", "by a program ***"):
        assert expected in events, expected
    assert '{"token": "***"}' in events
    assert TAG not in events


def test_what_a_body_raises_comes_home_without_the_secret(seen: Seen, token: sky.Secret) -> None:
    """SEC-9, SEC-15: message, chain, notes, arguments, remote traceback; the type stays."""
    with pytest.raises(ValueError, match=r"refused \*\*\*") as caught:
        use(token, "raise") >> seen.pool
    assert type(caught.value.__cause__) is KeyError
    cause = caught.value.__cause__
    assert TAG not in str((caught.value, caught.value.args, caught.value.__notes__, cause, cause.args))
    assert "tried ***" in caught.value.__notes__
    with pytest.raises(sky.errors.TaskCrashed, match=r"dying with \*\*\*") as crashed:
        use(token, "crash") >> seen.pool
    assert TAG not in repr(crashed.value) + str(vars(crashed.value))


def test_no_process_shows_a_secret_in_what_it_was_started_with(seen: Seen, token: sky.Secret) -> None:
    """SEC-10, SEC-13: neither command line nor environment; only this program was started with one, by its test."""
    use(token, "") @ seen.pool
    holders = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            for name in ("cmdline", "environ"):
                try:
                    if TAG.encode() in (entry / name).read_bytes():
                        holders.append((entry.name, name))
                except OSError:
                    pass
    assert holders == []


def test_no_file_holds_a_secret(seen: Seen, token: sky.Secret, tmp_path: Path) -> None:
    """SEC-10, SEC-11: in temporary directories, the cache, the state directory; while the pool is open."""
    use(token, "") @ seen.pool
    control = tmp_path / "control"
    control.write_text(f"{TAG}-control")
    cache = os.environ.get("SKYWARD_CACHE") or str(Path.home() / ".cache" / "skyward" / "resolved")
    places = [str(tmp_path), "/dev/shm", os.environ["SKYWARD_STATE"], seen.pool._fleet.store.directory, cache]
    found = subprocess.run(
        ["grep", "-rlaF", "--devices=skip", "-e", TAG, *places], capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == [str(control)]


def test_nothing_that_was_said_or_seen_shows_a_secret(seen: Seen) -> None:
    """SEC-9, SEC-10: events, log lines of every level, prints, messages; the last one, for it closes the pool."""
    seen.pool.close()
    said = [*seen.said, seen.printed.getvalue(), repr(seen.pool), repr(seen.pool.image)]
    for expected in ("PoolClosed", "plain ***", "'HF_PAT': '***'"):
        assert [text for text in said if expected in text], expected
    assert [text for text in said if TAG in text] == []
    assert [line for line in seen.commands if TAG in line] == []
