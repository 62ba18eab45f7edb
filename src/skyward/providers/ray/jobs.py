"""Ray's Jobs API over HTTP, without Ray and without the cluster's Python."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Protocol, cast
from urllib.parse import quote

from skyward.errors import CloudRefused, CredentialsMissing, InvalidArgument, NoCapacity, NoOffer

__all__ = [
    "REFUSED",
    "BesideDriver",
    "Busy",
    "Driver",
    "DriverReport",
    "JobDriver",
    "Jobs",
    "NothingFits",
    "RayRefused",
    "amounts",
    "check_named",
    "driver_source",
    "known_token",
    "read_reports",
]


ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
REFUSED = "refused"
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
    def __str__(self) -> str:
        return f"{self.region}: {self.action} failed: {self.message}"


class NotLetIn(CredentialsMissing, RayRefused):
    def __str__(self) -> str:
        return (
            f"{self.region} answers {self.code}: {self.message}. The cluster wants its token: give "
            "sky.Ray(token=...), set RAY_AUTH_TOKEN, or put it into ~/.ray/auth_token. On the head, "
            "`ray get-auth-token` shows it."
        )


def known_token() -> str | None:
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return Path(path).read_text().strip() or None
    except (OSError, ValueError):
        return None


def check_named(address: str, where: str) -> None:
    """Refuses to send the user's token where only a settings file says."""
    own = {os.environ.get(name, "").rstrip("/") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")}
    if address.startswith("http") and address.rstrip("/") not in own and known_token() is not None:
        raise InvalidArgument(
            f"{where} names the address {address!r}. Your token for Ray would be sent to it, and such a file may come "
            "from somebody else. If the cluster is yours, say so: export "
            f'RAY_API_SERVER_ADDRESS={shlex.quote(address)}. If it has no token, write token = "".'
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


@dataclass(frozen=True)
class Jobs:
    url: str
    token: str | None = field(default=None, repr=False)
    timeout: float = 30.0

    def upload(self, driver: str, order: Mapping[str, Any]) -> str:
        """Returns the package's name: the API does not show packages, unlike variables and entrypoint."""
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
        try:
            return self._json("GET", f"/api/jobs/{quote(id)}", "asking for the job", dict)
        except RayRefused as exc:
            if exc.code == "404":
                return None
            raise

    def log(self, id: str) -> str:
        answer = self._json("GET", f"/api/jobs/{quote(id)}/logs", "reading the job's log", dict)
        return str(answer.get("logs", ""))

    def listed(self) -> list[dict[str, Any]]:
        found = cast("list[dict[str, Any]]", self._json("GET", "/api/jobs/", "listing jobs", list))
        ours = [job for job in found if job.get("submission_id") and "skyward" in (job.get("metadata") or {})]
        return [job for job in ours if job.get("status") not in ENDED]

    def stop(self, id: str) -> str:
        """Its state as long as it has not ended."""
        try:
            self._ask("POST", f"/api/jobs/{quote(id)}/stop", "stopping the job")
        except RayRefused as exc:
            if exc.code not in ("400", "404"):
                raise
        job = self.job(id)
        return "" if job is None or job["status"] in ENDED else str(job["status"])

    def _json(self, method: str, path: str, action: str, kind: type) -> Any:
        try:
            found = json.loads(self._ask(method, path, action))
        except ValueError:
            found = None
        if not isinstance(found, kind):
            raise RayRefused(action, "", "what answers there is not Ray's Jobs API", self.url)
        return found

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
            code = REFUSED if isinstance(reason, ConnectionRefusedError) else ""
            raise RayRefused(action, code, f"{reason}. {_UNREACHABLE}", self.url, "server") from exc


_UNREACHABLE = (
    "Nothing answers there. The Jobs API is where Ray's dashboard is, port 8265 of the head. By default "
    "it listens on the head's loopback only: start the head with --dashboard-host=0.0.0.0, or forward the port "
    "(ssh -L 8265:localhost:8265 head, kubectl port-forward service/<name>-head-svc 8265)."
)


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


_LINES = 15
_HASTE = 5.0
_FOR_RAY = ("RAY_ADDRESS", "RAY_AUTH_", "RAY_TLS_", "RAY_USE_TLS")


def driver_source() -> str:
    return Path(__file__).with_name("driver.py").read_text()


class Driver(Protocol):
    def report(self) -> DriverReport: ...

    def glance(self) -> DriverReport: ...

    def ended(self) -> str: ...


@dataclass(frozen=True)
class JobDriver:
    jobs: Jobs
    id: str

    def report(self) -> DriverReport:
        return read_reports(self.jobs.log(self.id).splitlines())

    def glance(self) -> DriverReport:
        quick = replace(self, jobs=replace(self.jobs, timeout=_HASTE))
        try:
            return replace(quick.report(), ended=_first(quick.ended()))
        except RayRefused as exc:
            return DriverReport(refused=exc.code == REFUSED)  # asked again

    def ended(self) -> str:
        job = self.jobs.job(self.id)
        if job is None:
            return f"Ray knows no job {self.id} any more"
        if job["status"] not in ENDED:
            return ""
        return _words(f"the job {self.id} is {job['status']}", str(job.get("message", "")), self.jobs.log(self.id))


class BesideDriver:
    """Its standard input is the client's."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise InvalidArgument(
                f"address={order['address']!r} is a cluster that this program is to connect to by itself, and Ray is "
                "not installed here. Install the Ray that the cluster has (the extra `ray`), or give the address of "
                'its Jobs API, for which nothing is needed here: sky.Ray(address="http://<head>:8265").'
            )
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= {name: value for name, value in os.environ.items() if name.startswith(_FOR_RAY)}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            start_new_session=True,  # Ctrl-C in our terminal is for us
        )
        assert self._process.stdin is not None
        self._lines: list[str] = []
        self._reading = threading.Thread(target=self._read, name="skyward-ray", daemon=True)
        self._reading.start()
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and `ended` says why

    def report(self) -> DriverReport:
        return read_reports(list(self._lines))

    def glance(self) -> DriverReport:
        return replace(self.report(), ended=_first(self.ended()))

    def ended(self) -> str:
        if self._process.poll() is None:
            return ""
        self._reading.join(5)
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace")
        return _words(f"the driver ended with status {self._process.returncode}", self.report().failed, said)

    def stop(self, seconds: float) -> None:
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # Ray ends what a driver had that was killed
            process.wait()
        self._reading.join(5)
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line.decode("utf-8", "replace"))


def _words(what: str, message: str, log: str) -> str:
    first = _first(message.strip())
    last = [line for line in log.strip().splitlines() if not line.startswith("skyward: ")][-_LINES:]
    said = "".join(f"\n  {line}" for line in last)
    return f"{what}{f': {first}' if first else ''}" + (f"\nIts last lines:{said}" if said else "")


def _first(text: str) -> str:
    return text.partition("\n")[0]


_MARK = "skyward: "
_SHOWN = 8


class NothingFits(NoOffer):
    """No node of a Ray cluster, or too few of them, has what was requested."""

    def __str__(self) -> str:
        has = "".join(f"\n  {node}" for node in self.reasons[:_SHOWN])
        more = f"\n  ... and {len(self.reasons) - _SHOWN} more" if len(self.reasons) > _SHOWN else ""
        return (
            f"Ray at {self.where} cannot have {self.wish}; nothing is left there. Its nodes have:{has}{more}\n"
            "Ask for fewer nodes or for less on each (resources=), or let several nodes be on one machine "
            '(strategy="SPREAD" or "PACK"). If the cluster grows when something is asked of it, say autoscaling=True.'
        )


class Busy(NoCapacity):
    def __str__(self) -> str:
        has = "".join(f"\n  {node}" for node in self.attempts[:_SHOWN])
        return (
            f"Ray had no room for {self.wish} in time; nothing is left there. Free on its nodes:{has}\nOthers use the "
            "rest, or the cluster has not grown yet: `ray status` shows it. Try again later, ask for less, let several "
            'nodes be on one machine (strategy="SPREAD"), or wait longer: provision_timeout=.'
        )


@dataclass(frozen=True)
class DriverReport:
    waiting: str = ""
    nodes: Sequence[str] = ()
    free: Sequence[str] = ()
    placed: bool = False
    infeasible: str = ""
    failed: str = ""
    over: bool = False
    started: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    losses: Mapping[int, Sequence[str]] = field(default_factory=dict[int, Sequence[str]])
    ended: str = ""
    refused: bool = False
    head: str = ""
    hopeless: str = ""

    def progress(self, count: int, wish: str) -> str:
        if self.waiting == "INFEASIBLE":
            return f"Ray: no node fits {wish} yet"
        if self.waiting:
            return f"Ray has no room yet for {wish}" + (f"; free: {'; '.join(self.free)}" if self.free else "")
        return f"Ray: {len(self.started)} of {count} places started" if self.placed else "Ray: the driver is starting"


def read_reports(lines: Iterable[str]) -> DriverReport:
    said: dict[str, Any] = {}
    started: dict[int, Mapping[str, Any]] = {}
    losses: dict[int, list[str]] = {}
    for line in lines:
        message = _message(line)
        match message:
            case {"waiting": str(state)}:
                said |= {"waiting": state, "nodes": _described(message.get("nodes"))}
            case {"infeasible": dict()}:
                wish = amounts(cast("Mapping[str, float]", message["infeasible"]))
                said |= {"infeasible": wish, "nodes": _described(message.get("nodes"))}
            case {"free": list()}:
                said["free"] = _described(message["free"])
            case {"placed": _}:
                said |= {"waiting": "", "placed": True, "head": str(message.get("head", ""))}
            case {"started": int(index)}:
                started[index] = message
            case {"ended": int(index), "why": str(why)}:
                started.pop(index, None)
                if why:
                    losses.setdefault(index, []).append(why)
                if message.get("given_up") and why:
                    said["hopeless"] = why
            case {"failed": str(why)}:
                said["failed"] = why
            case {"over": _}:
                said["over"] = True
            case _:
                pass
    return DriverReport(**said, started=started, losses=losses)


def amounts(resources: Mapping[str, float]) -> str:
    parts: list[str] = []
    for name, amount in sorted(resources.items(), key=lambda item: (item[0] not in ("CPU", "GPU"), item[0])):
        if name == "memory":
            parts.append(f"{amount / 1e9:.3g} GB of memory")
        elif name.startswith("accelerator_type:"):
            parts.append(name.partition(":")[2])
        else:
            parts.append(f"{amount:g} {name}")
    return ", ".join(parts) or "nothing"


def _described(nodes: object) -> tuple[str, ...]:
    if not isinstance(nodes, list):
        return ()
    known = cast("list[dict[str, Any]]", nodes)
    return tuple(sorted(f"{node.get('address')}: {_has(node)}" for node in known))


def _has(node: Mapping[str, Any]) -> str:
    resources: Mapping[str, float] = node.get("resources") or {}
    if "free" not in node:
        return amounts(resources)
    return ", ".join(
        f"{amounts({name: node['free'].get(name, 0)}).partition(' ')[0]} of {amounts({name: resources[name]})}"
        for name in resources
    )


def _message(line: str) -> dict[str, Any]:
    if not line.startswith(_MARK):
        return {}
    try:
        found = json.loads(line[len(_MARK) :])
    except ValueError:
        return {}  # cut off, or not ours
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
