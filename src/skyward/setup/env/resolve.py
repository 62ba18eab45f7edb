"""The packages of an image, resolved once for all hosts of a platform, and kept for the next pool.

<cache>/resolved/<question>/<platform>.json    pins: names, versions, hashes, files to send
                           built/*.whl         wheels that are on this computer only
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
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from skyward.api.image import Image, mask
from skyward.errors import BootstrapError
from skyward.machines.parallel import each
from skyward.setup.env.compile import Resolution
from skyward.setup.env.requirements import Pin, check_digest, file_name, question, with_hash
from skyward.setup.env.script import Carried, Recipe, environment_key, recipe, record, requirement
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

if TYPE_CHECKING:
    from ssl import SSLContext
    from urllib.request import Request

__all__ = ["Packages", "fetch", "logins"]


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
        """What was resolved, as a requirements.txt with hashes, for the first platform."""
        found = sorted(self._home.glob("*.txt"))
        return found[0].read_text() if found else ""

    def recipe(self, platform: str, cache: str, deadline: float, carry: bool = False) -> Recipe:
        """Resolves for a platform unless cached. With `carry` the host needs no network."""
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
