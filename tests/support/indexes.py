"""Package indexes on loopback, with real wheels and sdists that exist nowhere else; they can misbehave on demand."""

from __future__ import annotations

import base64
import functools
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Index", "sdist", "sources", "wheel"]

_BACKEND = """
import json, os, pathlib, zipfile

with open({witness!r}, "a") as file:
    file.write(json.dumps(dict(os.environ)) + "\\n")

def get_requires_for_build_wheel(settings=None):
    return []

def build_wheel(directory, settings=None, metadata=None):
    info = "{name}-{version}.dist-info"
    with zipfile.ZipFile(os.path.join(directory, "{name}-{version}-py3-none-any.whl"), "w") as archive:
        archive.writestr("{name}.py", "version = {version!r}\\nbuilt = True\\n")
        archive.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        archive.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "/RECORD", "")
    return "{name}-{version}-py3-none-any.whl"
"""


def wheel(directory: Path, name: str, version: str, more: str = "", requires: Sequence[str] = ()) -> Path:
    """A tiny package."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n{more}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def sources(name: str, version: str, witness: Path, requires: Sequence[str] = ()) -> dict[str, str]:
    """The files of a package whose build writes the environment that it runs in, a line of JSON, into `witness`."""
    needs = ", ".join(f'"{line}"' for line in requires)
    backend = _BACKEND.replace("{witness!r}", repr(str(witness))).replace("{name}", name)
    return {
        "pyproject.toml": f'[build-system]\nrequires = [{needs}]\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": backend.replace("{version!r}", repr(version)).replace("{version}", version),
        "PKG-INFO": f"Metadata-Version: 1.0\nName: {name}\nVersion: {version}\n",
    }


def sdist(directory: Path, name: str, version: str, witness: Path) -> Path:
    """A package as an archive of its sources, as `sources` says."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}-{version}.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for path, text in sources(name, version, witness).items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return file


class Index:
    """A package index on loopback, which may want a login and can misbehave."""

    def __init__(self, root: Path, login: str = "") -> None:
        self.root, self.login, self.refusals = root, login, 0
        self.seen: list[str] = []
        outer = self

        class Answer(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append(self.path)
                wanted = f"Basic {base64.b64encode(outer.login.encode()).decode()}"
                if outer.login and self.headers.get("Authorization") != wanted:
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", "Basic")
                    self.end_headers()
                elif outer.refusals:
                    outer.refusals -= 1
                    self.send_error(503)
                else:
                    super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        (root / "simple").mkdir(parents=True)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Answer, directory=str(root)))
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.05])
        self.thread.start()

    @property
    def address(self) -> str:
        """Where it answers, without the login."""
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def url(self) -> str:
        """What pip and uv are told."""
        return f"{self.address.replace('://', f'://{self.login}@' if self.login else '://', 1)}/simple"

    def add(self, name: str, version: str, more: str = "", requires: Sequence[str] = ()) -> Path:
        """Offers a wheel; a file of that name is replaced."""
        return self._offer(name, wheel(self.root / "files", name, version, more, requires))

    def add_source(self, name: str, version: str, witness: Path) -> Path:
        """Offers a source archive."""
        return self._offer(name, sdist(self.root / "files", name, version, witness))

    def asked_for(self, name: str) -> bool:
        """Whether anybody wanted a package of that name."""
        return any(f"/simple/{name}/" in path or f"/{name}-" in path for path in self.seen)

    def _offer(self, name: str, file: Path) -> Path:
        page = self.root / "simple" / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        line = f'<a href="/files/{file.name}">{file.name}</a>\n'
        before = page.read_text() if page.exists() else ""
        page.write_text(before if line in before else before + line)
        return file

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
