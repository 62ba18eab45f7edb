"""Makes an image's environment on a host, unless it is there.

    look.sh ──ready──────────────────────────────────────────────► Environment      (one round trip)
       └──not yet── resolve (once for all hosts) ── send ── setup.sh ──► Environment      (again with what it lacks)

Standard input is held open: when it ends, so does everything there.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyward.api.image import Image, mask
from skyward.api.secret import installer_environment
from skyward.api.shell import Process, Shell
from skyward.errors import BootstrapError, PythonMismatch
from skyward.setup.env.local import Environment
from skyward.setup.env.requirements import check_host_path, check_platform, check_python, tools
from skyward.setup.env.resolve import Packages
from skyward.setup.env.script import Recipe, look_script, stop_script
from skyward.setup.env.uv import RESOLVING, too_late
from skyward.setup.local_shell import LocalShell

__all__ = ["Packages", "Patience", "Report", "prepare_host", "stop_script"]

Report = Callable[[str, float | None], None]

_LOOKING = "checking the host"
_SENDING = "sending packages"
_FETCHING = "fetching packages for a host without a network"
_FETCHING_PYTHON = "fetching Python for a host without a network"
_NO_PYTHON, _NO_NETWORK = 31, 32  # the script's exit status for it
# An environment with Skyward alone takes about half of this; what is sent is there twice for a while, and unpacked.
_NEED_KB = 300_000
_TIMES = 4
_MOST = 5
# Larger files are sent one by one, from the disk.
_LARGE = 8 << 20
_START = 'cd "$1" && tar -xf bundle.tar && exec sh "$1/setup.sh" "$@"; code=$?; rm -rf "$1"; exit "$code"'


@dataclass
class _Said:
    facts: dict[str, str] = field(default_factory=dict[str, str])
    kept: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    lines: list[str] = field(default_factory=list[str])
    step: str = _LOOKING

    def hear(self, word: str, rest: str) -> None:
        match word:
            case "problem":
                code, _, text = rest.partition(" ")
                self.problems.append((code, text))
            case "wheel" | "complete":
                self.kept.add((word, rest))
            case "|":
                self.lines.append(rest)
            case _:
                self.facts[word] = rest


class Patience:
    """A timeout that restarts with each sign of progress, up to a fixed multiple."""

    def __init__(self, deadline: float, limit: float) -> None:
        self.deadline = deadline
        self._limit, self._last = limit, deadline + _MOST * limit

    def extend(self, now: float) -> None:
        self.deadline = max(self.deadline, min(self._last, now + self._limit))


def prepare_host(
    shell: Shell, image: Image, *, pool: str, deadline: float, report: Report, packages: Packages
) -> Environment:
    check_python(image)
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", pool)[:60] or "pool"
    seen = _look(shell, image, name, packages, deadline)
    fresh = "ready" not in seen.facts
    python: Path | None = None
    because: BootstrapError | None = None
    while "ready" not in seen.facts:
        try:
            _make(shell, image, name, seen, packages, deadline, report, because, python)
        except BootstrapError as exc:
            # A host in a closed network; this computer may reach what it cannot.
            if exc.exit_code == _NO_NETWORK and because is None:
                because = exc
            elif exc.exit_code == _NO_PYTHON and python is None:
                with _timed(report, _FETCHING_PYTHON):
                    python = packages.python(seen.facts["platform"], deadline)
                if python is None:
                    exc.add_note("This computer could not get one to send there, either.")
                    raise
            else:
                raise
            seen = _look(shell, image, name, packages, deadline)
    return replace(_environment(shell, seen.facts), fresh=fresh)


def _look(shell: Shell, image: Image, pool: str, packages: Packages, deadline: float) -> _Said:
    token = secrets.token_hex(8)
    script = look_script(packages.uv_version)
    pairs = [f"{platform}={key}" for platform, key in packages.known().items()]
    arguments = [token, pool, str(_NEED_KB), " ".join(image.apt), " ".join(["tar", *tools(image.pip)]), *pairs]
    try:
        done = shell.run(["sh", "-c", script, "sky", *arguments], timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise too_late(_LOOKING, image) from None
    seen = _Said()
    for word, rest in _lines(done.out, token):
        seen.hear(word, rest)
    if seen.problems:
        raise _failure(shell, seen, done.code)
    if "ready" not in seen.facts and "stage" not in seen.facts:
        raise BootstrapError(_LOOKING, f"{shell.name} did not answer as expected.\n{_tail(done.err)}", None, done.code)
    cache = seen.facts.get("cache", "")
    check_platform(seen.facts.get("platform", ""), shell.name, _LOOKING)
    check_host_path(cache, shell.name, _LOOKING)
    if "stage" in seen.facts:
        check_host_path(seen.facts["stage"], shell.name, _LOOKING, f"{cache}/stage")
    return seen


def _make(
    shell: Shell,
    image: Image,
    pool: str,
    seen: _Said,
    packages: Packages,
    deadline: float,
    report: Report,
    because: BootstrapError | None = None,
    python: Path | None = None,
) -> None:
    """Builds the environment. With `because`, the host could not download and everything is sent."""
    try:
        with _timed(report, _FETCHING if because else RESOLVING):
            try:
                recipe = packages.recipe(
                    seen.facts["platform"], seen.facts["cache"], deadline, carry=because is not None
                )
            except BootstrapError as exc:
                raise because or exc from exc
        with _timed(report, _SENDING):
            need = _send(shell, recipe, seen, packages, deadline, python)
    except BaseException:
        _remove(shell, seen.facts["stage"])
        raise
    _set_up(shell, image, recipe, pool, need, seen, deadline, report)


def _send(
    shell: Shell, recipe: Recipe, seen: _Said, packages: Packages, deadline: float, python: Path | None = None
) -> int:
    stage, done = seen.facts["stage"], ("complete", recipe.key) in seen.kept
    missing = [] if done else [file for file in recipe.carried if ("wheel", file.digest) not in seen.kept]
    large = [file for file in missing if file.path.stat().st_size > _LARGE]
    try:
        if not done and "uv" not in seen.facts and (uv := packages.uv(seen.facts["platform"], deadline)):
            shell.upload(uv, f"{stage}/uv")
        if python is not None:
            shell.upload(python, f"{stage}/python.tar.gz")
        for file in large:
            shell.upload(file.path, f"{stage}/{file.sent_as}")
        shell.upload(packages.bundle(recipe, [file for file in missing if file not in large]), f"{stage}/bundle.tar")
    except OSError as exc:
        raise BootstrapError(_SENDING, f"{shell.name}: {exc.strerror}. Look at the free space there.") from exc
    sent = [file.path for file in missing] + ([] if python is None else [python])
    return _NEED_KB + _TIMES * sum(path.stat().st_size for path in sent) // 1024


def _set_up(
    shell: Shell, image: Image, recipe: Recipe, pool: str, need: int, seen: _Said, deadline: float, report: Report
) -> None:
    token = secrets.token_hex(8)
    arguments = [seen.facts["stage"], token, pool, recipe.key, str(need), "hold"]
    # Only on this computer is an environment given: a host has its own.
    own = installer_environment(os.environ, repositories=True) if isinstance(shell, LocalShell) else {}
    with tempfile.TemporaryFile() as errors:
        process = shell.start(["sh", "-c", _START, "sky", *arguments], own, errors)
        try:
            _write(process, "{}\n{}".format(recipe.settings.count("\n"), recipe.settings))
            patience = Patience(deadline, image.bootstrap_timeout)
            for line in _until(process, lambda: patience.deadline):
                for word, rest in _lines(line, token):
                    if word == "progress":
                        patience.extend(time.monotonic())
                    else:
                        _hear(seen, word, rest, report)
            if process.poll() is None and time.monotonic() >= patience.deadline:
                raise too_late(seen.step, image)
            code = process.wait(10)
        finally:
            _end(process)
        if "ready" not in seen.facts:
            errors.seek(0)
            seen.lines += [] if seen.lines else _tail(errors.read().decode("utf-8", "replace")).splitlines()
            raise _failure(shell, seen, code)


def _hear(seen: _Said, word: str, rest: str, report: Report) -> None:
    if word == "begin":
        seen.step = rest
        report(rest, None)
    elif word == "end":
        took, _, step = rest.partition(" ")
        report(step, int(took) / 1000)
    else:
        seen.hear(word, rest)


def _environment(shell: Shell, facts: dict[str, str]) -> Environment:
    home, _, rest = facts["ready"].partition("\t")
    directory = rest.partition("\t")[0]
    check_host_path(home, shell.name, _LOOKING, f"{facts['cache']}/envs")
    check_host_path(directory, shell.name, _LOOKING, f"{facts['cache']}/pools")
    return Environment(f"{home}/bin/python", {"VIRTUAL_ENV": home, "PATH": f"{home}/bin:{facts['path']}"}, directory)


def _failure(shell: Shell, seen: _Said, code: int) -> BootstrapError:
    texts = [text for _, text in seen.problems] or [f"the script that sets it up ended with status {code}."]
    detail = f"{shell.name}: {' Also: '.join(texts)}"
    if seen.lines:
        detail += "\nLast lines there:\n" + "\n".join(seen.lines)
    if "log" in seen.facts:
        detail += f"\nAll of it is in {seen.facts['log']} there."
    kind = PythonMismatch if any(problem == "python" for problem, _ in seen.problems) else BootstrapError
    return kind(seen.step, mask(detail), None, code or None)


def _lines(text: bytes, token: str) -> Iterator[tuple[str, str]]:
    for line in text.split(b"\n"):
        mark, _, said = line.decode("utf-8", "surrogateescape").partition(" ")
        if mark == f"@{token}":
            word, _, rest = said.partition(" ")
            yield word, rest


def _until(process: Process, deadline: Callable[[], float]) -> Iterator[bytes]:
    assert process.stdout is not None
    left = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline() - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return
            whole, end, left = (left + piece).rpartition(b"\n")
            yield whole + end


def _write(process: Process, text: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(text.encode("utf-8", "surrogateescape"))
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended already; its exit status says why


def _end(process: Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _remove(shell: Shell, stage: str) -> None:
    try:
        shell.run(["rm", "-rf", stage], timeout=5)
    except (BootstrapError, OSError, subprocess.TimeoutExpired):
        pass  # the next look at the host removes it


@contextmanager
def _timed(report: Report, step: str) -> Generator[None]:
    report(step, None)
    began = time.monotonic()
    yield
    report(step, time.monotonic() - began)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-20:])
