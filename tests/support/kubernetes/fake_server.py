"""A small API server that does what a real one does not do on demand; pods are processes of this machine.

with FakeServer(tmp_path) as server:
    server.fail("GET", "/pods", 429)                  the next such request is refused with this status
    server.cut = 1000                                  the next `exec` breaks after so many bytes

It knows Jobs, pods, Secrets and events as far as `sky.Kubernetes()` needs them, checks no rights, and has no nodes: the
pods of a Job that is not suspended run at once.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web

__all__ = ["FakeServer"]

_MOUNTED = "/etc/skyward"
_VERBS = ["create", "get", "list", "patch", "delete", "watch"]
_KINDS = {
    "v1": {"pods": "Pod", "secrets": "Secret", "events": "Event", "nodes": "Node"},
    "batch/v1": {"jobs": "Job"},
    "authorization.k8s.io/v1": {"selfsubjectaccessreviews": "SelfSubjectAccessReview"},
    "authentication.k8s.io/v1": {"selfsubjectreviews": "SelfSubjectReview"},
}
_REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 410: "Expired"}
_REASONS |= {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


class FakeServer:
    """Runs in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.config = directory / "kubeconfig"
        self._files = directory / "files"
        self.requests: list[str] = []
        """Methods and paths, in order."""
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        """By plural and name."""
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and resources that this user is not allowed."""
        self.cut: int | None = None
        self.delay = 0.0
        """Seconds that a list takes."""
        self._faults: list[tuple[str, str, int]] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._count = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> FakeServer:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()

    def fail(self, method: str, path: str, status: int, times: int = 1) -> None:
        """Refuses the next requests of this method whose path has this in it."""
        with self._lock:
            self._faults += [(method, path, status)] * times

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        self.config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                    "users": [{"name": "me", "user": {}}],
                    "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
                    "current-context": "fake",
                }
            )
        )
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.requests.append(f"{request.method} {path}")
        with self._lock:
            fault = next((f for f in self._faults if f[0] == request.method and f[1] in path), None)
            if fault is not None:
                self._faults.remove(fault)
        if fault is not None:
            return _refused(fault[2], "a fault of the test", "Conflict" if request.method == "PATCH" else "")
        if path == "/version":
            return web.json_response({"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
        if (found := _discovery(path)) is not None:
            return web.json_response(found)
        match = re.fullmatch(r"/apis?/(.*?v1)/(?:namespaces/[^/]+/)?([a-z]+)(?:/([^/]+))?(/exec)?", path)
        if match is None or match[2] not in _KINDS.get(match[1], {}):
            return _refused(404, f"no {path}")
        version, plural, name = match[1], match[2], match[3]
        if match[4]:
            return await self._exec(request)
        kind = _KINDS[version][plural]
        if request.method == "POST":
            return self._create(version, kind, plural, await request.json(), dry="dryRun" in request.query)
        if name is None:
            await asyncio.sleep(self.delay)
            items = [item for (known, _), item in list(self.objects.items()) if known == plural]
            items = [item for item in items if _fits(item, request.query.get("labelSelector", ""))]
            return web.json_response({"apiVersion": version, "kind": f"{kind}List", "metadata": {}, "items": items})
        item = self.objects.get((plural, name))
        if item is None:
            return _refused(404, f'{plural} "{name}" not found')
        if request.method == "PATCH":
            item["spec"] |= json.loads(await request.read())["spec"]
            self._make_pods(item)
        elif request.method == "DELETE":
            del self.objects[plural, name]
            if kind == "Job":
                for key in [key for key, owned in self.objects.items() if _owner(owned) == name]:
                    del self.objects[key]
        return web.json_response(item)

    def _create(self, version: str, kind: str, plural: str, item: dict[str, Any], dry: bool) -> web.Response:
        if kind == "SelfSubjectAccessReview":
            asked = item["spec"]["resourceAttributes"]
            name = "/".join(filter(None, [asked["resource"], asked.get("subresource")]))
            return web.json_response({**item, "status": {"allowed": (asked["verb"], name) not in self.forbidden}})
        if kind == "SelfSubjectReview":
            return web.json_response({**item, "status": {"userInfo": {"username": "me"}}})
        name = item["metadata"]["name"]
        if (plural, name) in self.objects:
            return _refused(409, f'{plural} "{name}" already exists')
        if dry:
            return web.json_response({**item, "apiVersion": version, "kind": kind}, status=201)
        for file, content in item.get("stringData", {}).items():
            self._files.mkdir(exist_ok=True)
            (self._files / file).write_text(content)
        self._count += 1
        item["metadata"] |= {"uid": f"uid-{self._count}", "namespace": "default"}
        item |= {"apiVersion": version, "kind": kind}
        self.objects[plural, name] = item
        return web.json_response(item, status=201)

    def _make_pods(self, job: dict[str, Any]) -> None:
        spec, name = job["spec"], job["metadata"]["name"]
        for index in range(0 if spec.get("suspend") else spec["completions"]):
            pods = [p for (plural, _), p in self.objects.items() if plural == "pods" and _owner(p) == name]
            if any(_index(pod) == index for pod in pods):
                continue
            self._count += 1
            metadata = {
                "name": f"{name}-{index}-{self._count:05d}",
                "namespace": "default",
                "uid": f"uid-{self._count}",
                "labels": spec["template"]["metadata"]["labels"],
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "ownerReferences": [{"kind": "Job", "name": name}],
            }
            container = {"name": "skyward", "ready": True, "state": {"running": {}}}
            self.objects["pods", metadata["name"]] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata,
                "spec": {**spec["template"]["spec"], "nodeName": "here"},
                "status": {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [container]},
            }

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"], max_msg_size=0)
        await socket.prepare(request)
        words = [word.replace(_MOUNTED, str(self._files)) for word in request.query.getall("command")]
        process = await asyncio.create_subprocess_exec(*words, stdin=-1, stdout=-1, stderr=-1)
        assert process.stdin is not None
        left, self.cut = self.cut, None

        async def copy(stream: asyncio.StreamReader | None, channel: int) -> None:
            nonlocal left
            assert stream is not None
            while data := await stream.read(1 << 12):
                if left is not None and (left := left - len(data)) <= 0:
                    assert request.transport is not None
                    request.transport.abort()
                    process.kill()
                with suppress(ConnectionError):
                    await socket.send_bytes(bytes([channel]) + data)

        async def feed(stdin: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                async for message in socket:
                    if message.type == WSMsgType.BINARY and message.data[0] == 0:
                        stdin.write(message.data[1:])
                        await stdin.drain()
                    elif message.type == WSMsgType.BINARY and message.data[:2] == b"\xff\0":
                        stdin.close()
            stdin.close()

        reading = asyncio.create_task(feed(process.stdin))
        try:
            await asyncio.gather(copy(process.stdout, 1), copy(process.stderr, 2))
            code = await process.wait()
            status: dict[str, Any] = {"metadata": {}, "status": "Success"}
            if code:
                causes = [{"reason": "ExitCode", "message": str(abs(code))}]
                status |= {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
            with suppress(ConnectionError):
                await socket.send_bytes(b"\x03" + json.dumps(status).encode())
            await socket.close()
        finally:
            reading.cancel()
            process._transport.close()  # pyright: ignore # what was cut has unread output, and would be warned of
        return socket


def _refused(code: int, text: str, conflict: str = "") -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "metadata": {}}
    headers = {"Retry-After": "1"} if code == 429 else {}
    return web.json_response(
        {**status, "reason": (code == 409 and conflict) or _REASONS.get(code, ""), "message": text},
        status=code,
        headers=headers,
    )


def _discovery(path: str) -> dict[str, Any] | None:
    groups = [version.split("/") for version in _KINDS if "/" in version]
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        made = [
            {
                "name": group,
                "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
            }
            for group, version in groups
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": made}
    if path.startswith("/openapi/v3"):
        return _openapi(path.removeprefix("/openapi/v3/").removeprefix("apis/").removeprefix("api/"))
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in _KINDS:
        return None
    resources = [
        {
            "name": name,
            "singularName": kind.lower(),
            "namespaced": "Self" not in kind and kind != "Node",
            "kind": kind,
            "verbs": _VERBS,
        }
        for name, kind in _KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _openapi(version: str) -> dict[str, Any]:
    """That the server itself looks for fields that do not exist."""
    if version not in _KINDS:
        names = {known: f"{'apis/' if '/' in known else 'api/'}{known}" for known in _KINDS}
        return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in names.values()}}
    group, _, number = version.rpartition("/")
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {
        f"/{name}": {
            "patch": {
                "parameters": parameters,
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
            }
        }
        for name, kind in _KINDS[version].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}


def _fits(item: Mapping[str, Any], selector: str) -> bool:
    labels = item["metadata"].get("labels", {})
    return all(
        labels.get(name) == value for name, _, value in (part.partition("=") for part in selector.split(",") if part)
    )


def _owner(item: Mapping[str, Any]) -> str:
    return next((owner["name"] for owner in item["metadata"].get("ownerReferences", [])), "")


def _index(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
