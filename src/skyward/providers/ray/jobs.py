"""Ray's Jobs API over HTTP: jobs are submitted, looked at and stopped without Ray, and without the cluster's Python."""

from __future__ import annotations

import io
import json
import os
import secrets
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from skyward.errors import CloudRefused, CredentialsMissing

__all__ = ["ENDED", "Jobs", "RayRefused", "known_token"]

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
"""The states of a job whose driver is gone."""
_MOST = 64 << 20

# The cluster's Python need not be on the head's PATH. The raylet, which runs our shell's parent, was told where it is.
_START = r"""
raylet=$(tr '\0' '\n' < "/proc/$PPID/environ" | sed -n 's/^RAY_RAYLET_PID=//p')
told=$(tr '\0' '\n' < "/proc/$raylet/cmdline" | sed -n 's/^--python_worker_command=\([^ ]*\).*/\1/p')
for python in "$told" python python3; do
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ray") is None)' 2>/dev/null &&
        exec "$python" -u driver.py order.json
done
echo "no Python that has Ray was found on the head: neither the one of its raylet, nor python or python3 on the PATH"
exit 1
"""


class RayRefused(CloudRefused):
    """Something that the Jobs API of a Ray cluster did not do."""

    def __str__(self) -> str:
        return f"{self.region}: {self.action} failed: {self.message}"


class NotLetIn(CredentialsMissing, RayRefused):
    """A Ray cluster does not know the token, or wants one."""

    def __str__(self) -> str:
        return (
            f"{self.region} answers {self.code}: {self.message}. The cluster wants its token: give "
            "sky.Ray(token=...), set RAY_AUTH_TOKEN, or put it into ~/.ray/auth_token. On the head, "
            "`ray get-auth-token` shows it."
        )


def known_token() -> str | None:
    """The token of a cluster where Ray's own programs look for it."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return Path(path).read_text().strip() or None
    except (OSError, ValueError):
        return None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Nobody sends our token to another address."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


@dataclass(frozen=True)
class Jobs:
    """The Jobs API at an address."""

    url: str
    token: str | None = field(default=None, repr=False)
    timeout: float = 30.0

    def upload(self, driver: str, order: Mapping[str, Any]) -> str:
        """Puts the files of a job there; gives the package's name. The order holds a secret, which Ray never shows.

        A package is kept for as long as a job uses it, and the API only says whether it is there. Variables and the
        entrypoint of a job, however, are shown to whoever lists jobs.
        """
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in (("start.sh", _START), ("driver.py", driver), ("order.json", json.dumps(order))):
                entry = zipfile.ZipInfo(name)
                entry.external_attr = 0o100600 << 16
                archive.writestr(entry, text)
        package = f"_ray_pkg_{secrets.token_hex(16)}.zip"
        self._ask("PUT", f"/api/packages/gcs/{package}", "uploading the driver", packed.getvalue())
        return package

    def submit(self, package: str, metadata: Mapping[str, str]) -> str:
        """Starts the driver of a package on the head; gives the job's id."""
        id = f"skyward-{metadata['skyward']}-{secrets.token_hex(3)}"
        job = {
            "entrypoint": "exec sh start.sh",
            "submission_id": id,
            "runtime_env": {"working_dir": f"gcs://{package}"},
            "metadata": dict(metadata),
        }
        self._ask("POST", "/api/jobs/", "submitting the job", json.dumps(job).encode())
        return id

    def job(self, id: str) -> dict[str, Any] | None:
        """What Ray knows of a job; None if it knows none of that id."""
        try:
            return cast("dict[str, Any]", self._json("GET", f"/api/jobs/{quote(id)}", "asking for the job"))
        except RayRefused as exc:
            if exc.code == "404":
                return None
            raise

    def log(self, id: str) -> str:
        """What the driver of a job has printed."""
        answer = self._json("GET", f"/api/jobs/{quote(id)}/logs", "reading the job's log")
        return str(answer.get("logs", ""))

    def listed(self) -> list[dict[str, Any]]:
        """Jobs that carry the mark of Skyward and have not ended."""
        found = cast("list[dict[str, Any]]", self._json("GET", "/api/jobs/", "listing jobs"))
        ours = [job for job in found if job.get("submission_id") and "skyward" in (job.get("metadata") or {})]
        return [job for job in ours if job.get("status") not in ENDED]

    def stop(self, id: str, seconds: float) -> None:
        """Stops a job, and returns when its driver is gone; one that has ended already is no error."""
        deadline = time.monotonic() + seconds
        try:
            self._ask("POST", f"/api/jobs/{quote(id)}/stop", "stopping the job")
        except RayRefused as exc:
            if exc.code not in ("400", "404"):
                raise
        while (job := self.job(id)) is not None and job["status"] not in ENDED:
            if time.monotonic() > deadline:
                raise RayRefused("stopping the job", "", f"{id} is still {job['status']}", self.url)
            time.sleep(0.1)

    def _json(self, method: str, path: str, action: str) -> Any:
        try:
            return json.loads(self._ask(method, path, action))
        except ValueError as exc:
            raise RayRefused(action, "", "what answers there is not Ray's Jobs API", self.url) from exc

    def _ask(self, method: str, path: str, action: str, data: bytes | None = None) -> bytes:
        kind = "application/json" if path.startswith("/api/jobs") else "application/octet-stream"
        headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        if data is None and method == "POST":
            data = b""
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.build_opener(_NoRedirects).open(request, timeout=self.timeout) as answer:
                return answer.read(_MOST)
        except urllib.error.HTTPError as exc:
            with exc:
                said = exc.read(2000).decode("utf-8", "replace").strip()
            if exc.code in (401, 403):
                raise NotLetIn(action, str(exc.code), said, self.url) from None
            raise RayRefused(action, str(exc.code), f"{exc.code} {_last(said) or exc.reason}", self.url) from None
        except (OSError, ValueError, HTTPException) as exc:
            reason = getattr(exc, "reason", exc)
            raise RayRefused(action, "", f"{reason}. {_UNREACHABLE}", self.url, "server") from exc


_UNREACHABLE = (
    "Nothing answers there. The Jobs API is where Ray's dashboard is, port 8265 of the head. By default "
    "it listens on the head's loopback only: start the head with --dashboard-host=0.0.0.0, or forward the port "
    "(ssh -L 8265:localhost:8265 head, kubectl port-forward service/<name>-head-svc 8265)."
)


def _last(text: str) -> str:
    """The last line: an exception's own words, if the answer is a traceback."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
