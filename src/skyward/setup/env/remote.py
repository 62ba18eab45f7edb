"""Makes an image's environment on a host, unless it is there.

    look.sh ──ready──────────────────────────────────────────────► Environment      (one round trip)
       └──not yet── resolve (once for all hosts) ── send ── setup.sh ──► Environment      (again with what it lacks)

Standard input is held open: when it ends, so does everything there.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import os
import platform as this
import re
import secrets
import selectors
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from skyward.api.image import Image, mask
from skyward.api.secret import installer_environment
from skyward.api.shell import Process, Shell
from skyward.errors import BootstrapError, PythonMismatch
from skyward.machines.parallel import each
from skyward.setup.env.compile import Resolution
from skyward.setup.env.local import Environment
from skyward.setup.env.requirements import (
    Pin,
    check_digest,
    check_host_path,
    check_platform,
    check_python,
    file_name,
    question,
    tools,
    with_hash,
)
from skyward.setup.env.script import (
    Carried,
    Recipe,
    environment_key,
    look_script,
    recipe,
    record,
    requirement,
    stop_script,
)
from skyward.setup.env.uv import (
    RESOLVING,
    cache_root,
    find_uv,
    index_options,
    own_directory,
    run_uv,
    too_late,
    uv_environment,
)
from skyward.setup.env.wheel import build_wheel, source_hash, tree_hash
from skyward.setup.local_shell import LocalShell, end_program

if TYPE_CHECKING:
    from ssl import SSLContext
    from urllib.request import Request

__all__ = [
    "Packages",
    "Patience",
    "Report",
    "fetch",
    "logins",
    "prepare_host",
    "stop_script",
]

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
    """With `because`, the host could not download and everything is sent."""
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
            end_program(process, 10.0)
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


# The packages of an image, resolved once for all hosts of a platform, and kept for the next pool.
#
# <cache>/resolved/<question>/<platform>.json    pins: names, versions, hashes, files to send
#                            built/*.whl         wheels that are on this computer only


_KEPT_DAYS = 90
_log = logging.getLogger("skyward.resolve")


class Packages:
    def __init__(self, image: Image) -> None:
        self._image = image
        self._lock = threading.Lock()
        self._fetching = threading.Lock()
        self._found: dict[str, Future[tuple[Pin, ...]]] = {}
        self._bundles: dict[tuple[str, ...], bytes] = {}
        self.new_records: list[str] = []

    @property
    def uv_version(self) -> str:
        return metadata.version("uv")

    def known(self) -> dict[str, str]:
        found = {path.stem: self._load(path.stem) for path in self._home.glob("*.json")}
        return {platform: environment_key(self._image, pins, platform) for platform, pins in found.items() if pins}

    def installed(self) -> dict[str, str]:
        found = [pin for path in self._home.glob("*.json") for pin in self._load(path.stem) or ()]
        built = str(self._home / "built")
        return {pin.name: "" if pin.marker or pin.file.startswith(built) else pin.wanted for pin in found}

    def listing(self) -> str:
        """A requirements.txt with hashes, for the first platform."""
        found = sorted(self._home.glob("*.txt"))
        return found[0].read_text() if found else ""

    def recipe(self, platform: str, cache: str, deadline: float, carry: bool = False) -> Recipe:
        """Cached. With `carry` the host needs no network."""
        with self._lock:
            mine = platform not in self._found
            future = self._found.setdefault(platform, Future())
        if mine:
            try:
                future.set_result(self._load(platform) or self._resolve(platform, deadline))
            except BaseException as exc:
                future.set_exception(exc)
        try:
            found = future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise too_late(RESOLVING, self._image) from None
        user = {**os.environ, **uv_environment(os.environ)}
        if carry:
            found = self._fetched(found, user, deadline)
        return recipe(self._image, found, platform, cache, user, self.uv_version)

    def uv(self, platform: str, deadline: float) -> Path | None:
        arch, _, libc = platform.partition("-")
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(this.machine().lower(), this.machine())
        if sys.platform == "linux" and arch == machine and libc.startswith("manylinux"):
            return Path(find_uv())
        kept = own_directory(cache_root(), "bin") / f"uv-{self.uv_version}-{platform}"
        with self._lock:
            if kept.exists():
                return kept
            with tempfile.TemporaryDirectory(dir=kept.parent) as work:
                asked, wanted = Path(work) / "uv.txt", f"uv=={self.uv_version}"
                pin = next((pin for pin in self._load(platform) or () if pin.wanted == wanted and pin.hashes), None)
                asked.write_text(wanted if pin is None else requirement(wanted, pin))
                how = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-platform", platform]
                finding = ["pip", "compile", *how, "--generate-hashes", "--output-file", str(asked), str(asked)]
                getting = ["pip", "install", *how, "--require-hashes", "--target", work, "--requirements", str(asked)]
                try:
                    for order in [getting] if pin is not None else [finding, getting]:
                        run_uv("getting uv for the host", order, self._image, deadline, Path(work))
                except BootstrapError as exc:
                    _log.info("no uv for %s: %s", platform, exc)
                    return None
                (Path(work) / "bin" / "uv").replace(kept)
        return kept

    def python(self, platform: str, deadline: float) -> Path | None:
        with self._fetching:
            return fetch_python(self._image, platform, deadline)

    def bundle(self, recipe: Recipe, carried: Sequence[Carried]) -> bytes:
        name = (recipe.key, *recipe.files.values(), *(file.sent_as for file in carried))
        with self._lock:
            if name not in self._bundles:
                self._bundles[name] = _packed(recipe, carried)
            return self._bundles[name]

    @cached_property
    def _home(self) -> Path:
        text = json.dumps(question(self._image, source_hash(), tree_hash))
        return own_directory(cache_root(), "resolved") / hashlib.sha256(text.encode()).hexdigest()[:24]

    def _load(self, platform: str) -> tuple[Pin, ...] | None:
        try:
            stored = json.loads((self._home / f"{platform}.json").read_text())
            found = tuple(replace(Pin(**entry), hashes=tuple(entry["hashes"])) for entry in stored)
        except (OSError, ValueError, TypeError, KeyError):
            return None  # not there, or of another version: it is made again
        if not all(Path(pin.file).exists() for pin in found if pin.file):
            return None
        os.utime(self._home)
        return found

    def _resolve(self, platform: str, deadline: float) -> tuple[Pin, ...]:
        self._forget()
        for directory in (self._home, self._home / "built"):
            directory.mkdir(mode=0o700, exist_ok=True)
        major, minor = self._image.python_version
        # Its mode, 0700, guards addresses in `pip` entries, which may hold passwords.
        with tempfile.TemporaryDirectory(dir=own_directory(cache_root(), "work")) as directory:
            work = Path(directory)
            options = ["--python", sys.executable, "--python-version", f"{major}.{minor}"]
            options += ["--python-platform", platform, *index_options()]
            resolution = Resolution(self._image, work, options, deadline, self._keep)
            found = tuple(with_hash(pin) for pin in resolution.pins(self._keep(build_wheel(work))))
            (work / "found.json").write_text(json.dumps([asdict(pin) for pin in found]))
            shutil.move(work / "found.json", self._home / f".{platform}-{os.getpid()}")
        (self._home / f".{platform}-{os.getpid()}").replace(self._home / f"{platform}.json")
        (self._home / f"{platform}.txt").write_text(record(found))
        self.new_records.append(str(self._home / f"{platform}.txt"))
        return found

    def _fetched(self, pins: Sequence[Pin], user: Mapping[str, str], deadline: float) -> tuple[Pin, ...]:
        index_settings = (
            user.get(name, "") for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_FIND_LINKS")
        )
        known = logins([*self._image.pip, *(index.address for index in self._image.pip_indexes), *index_settings])
        home = own_directory(cache_root(), "wheels")

        def fetched(pin: Pin) -> Pin:
            if pin.file or not (pin.url and pin.hashes):
                return pin
            check_digest(pin.hashes[0], RESOLVING)
            directory = home / pin.hashes[0][:16]
            file = fetch(pin.url, pin.hashes[0], directory, known, user.get("SSL_CERT_FILE"), deadline)
            return replace(pin, file=str(file), hashes=pin.hashes[:1])

        with self._fetching:
            return tuple(each(fetched, pins, 8))

    def _keep(self, wheel: Path) -> Path:
        kept = self._home / "built" / wheel.name
        shutil.move(wheel, kept)
        return kept

    def _forget(self) -> None:
        work = own_directory(cache_root(), "work")  # of processes that were killed
        for old in (*self._home.parent.iterdir(), *work.iterdir()):
            with suppress(FileNotFoundError):  # another process has removed its own
                if time.time() - old.stat().st_mtime > _KEPT_DAYS * 86400:
                    shutil.rmtree(old, ignore_errors=True)


def _packed(recipe: Recipe, carried: Sequence[Carried]) -> bytes:
    contents = {"setup.sh": recipe.script, **recipe.files}
    packed = io.BytesIO()
    # Every tar reads this format, also with long names.
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content := text.encode()), 0o600
            tar.addfile(member, io.BytesIO(content))
        for file in carried:
            member = tarfile.TarInfo(file.sent_as)
            member.size, member.mode = file.path.stat().st_size, 0o600
            with file.path.open("rb") as source:
                tar.addfile(member, source)
    return packed.getvalue()


_STEP = "fetching packages"
_TRIES = 3
_SILENCE = 30.0


def fetch(
    url: str, digest: str, directory: Path, known: Mapping[str, str], certificates: str | None, deadline: float
) -> Path:
    kept = directory / file_name(url, _STEP)
    if kept.exists():
        return kept
    from ssl import create_default_context  # not for a pool that fetches nothing
    from urllib.request import Request

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    request = Request(url)
    if login := known.get(urlsplit(url).netloc):
        # Not sent on to where the server may point us.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(unquote(login).encode()).decode()}")
    context = create_default_context(cafile=certificates)
    for attempt in range(_TRIES):
        try:
            with tempfile.NamedTemporaryFile(dir=directory, delete=False) as part:
                try:
                    found = _copy(request, part.file.fileno(), context, deadline)
                    if found != digest:
                        raise BootstrapError(
                            _STEP, f"{mask(url)} has the hash {found}, not {digest}. Look at the index."
                        )
                    os.rename(part.name, kept)
                    return kept
                except BaseException:
                    os.unlink(part.name)
                    raise
        except (URLError, OSError) as exc:
            if isinstance(exc, HTTPError):
                exc.close()  # it holds the connection
            if attempt + 1 == _TRIES or time.monotonic() > deadline:
                raise BootstrapError(
                    _STEP, f"{mask(url)} could not be downloaded: {exc}. Look at your network."
                ) from exc
            time.sleep(2**attempt)
    raise AssertionError


def logins(texts: Iterable[str]) -> dict[str, str]:
    return {server: login for text in texts for login, server in re.findall(r"://([^/\s?#]+)@([^/@\s]+)", text)}


def _copy(request: Request, file: int, context: SSLContext, deadline: float) -> str:
    from urllib.request import urlopen

    state = hashlib.sha256()
    with urlopen(request, timeout=_SILENCE, context=context) as answer:
        while piece := answer.read(1 << 20):
            if time.monotonic() > deadline:
                raise TimeoutError("the time is over")
            state.update(piece)
            os.write(file, piece)
    return state.hexdigest()


_PYTHON_STEP = "getting Python for the host"
_PYTHON_KEPT_DAYS = 30  # after which there may be a newer one


def fetch_python(image: Image, platform: str, deadline: float) -> Path | None:
    major, minor = image.python_version
    arch, libc = platform.partition("-")[0], "musl" if "musl" in platform else "gnu"
    name = f"cpython-{major}.{minor}-linux-{arch}-{libc}"
    kept = own_directory(cache_root(), "pythons") / f"{name}.tar.gz"
    if kept.exists() and time.time() - kept.stat().st_mtime < _PYTHON_KEPT_DAYS * 86400:
        return kept
    with tempfile.TemporaryDirectory(dir=kept.parent) as directory:
        work = Path(directory)
        order = ["python", "install", "--no-bin", "--install-dir", str(work / "all"), name]
        try:
            run_uv(_PYTHON_STEP, order, image, deadline, work)
        except BootstrapError as exc:
            _log.info("no Python for %s: %s", platform, exc)
            return kept if kept.exists() else None
        with tarfile.open(work / "python.tar.gz", "w:gz", compresslevel=6) as tar:
            for made in (work / "all").glob("cpython-*"):
                if not made.is_symlink():  # a link for the minor version leads to where it lies here
                    tar.add(made, made.name)
        (work / "python.tar.gz").replace(kept)
    return kept
