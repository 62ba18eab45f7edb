"""What plays the kubelet in tests: nodes that run pods as processes of test hosts, and serve `kubectl exec` there.

    python -m tests.support.kubernetes.kubelet < settings.json          prints "ready", ends with its standard input

Each pod has a process and a mount namespace of its own on its host, the user and the groups of its security context,
its variables, its Secrets as files and its empty directories. Images are not pulled: each is the host itself, but one
whose name begins with "missing" cannot be had.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import ssl
import sys
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import WSMsgType, web

__all__ = ["main"]

_HEARTBEAT = 5.0
_PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
# Makes what the pod sees of files, and then becomes its first process. Standard input is an archive of the Secrets.
_START = """
mount -t tmpfs -o mode=1777 tmpfs /tmp
for path in $1; do mkdir -p "$path"; mount -t tmpfs -o "mode=2777,gid=$2" tmpfs "$path"; done
tar -xPf -
shift 2
exec "$@" </dev/null
"""


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Kubelet:
    """All nodes of a cluster."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._server, self._token = settings["server"], settings["token"]
        self._nodes: dict[str, Mapping[str, Any]] = {node["name"]: node for node in settings["nodes"]}
        self._env: dict[str, str] = settings["env"]
        self._certificate: str = settings["certificate"]
        self._pods: dict[str, Pod] = {}
        self._port = 0
        self.session: aiohttp.ClientSession

    async def run(self) -> None:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as self.session:
            await self._serve()
            for node in self._nodes.values():
                await self._register(node)
            print("ready", flush=True)
            tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]
            try:
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
            finally:
                for task in tasks:
                    task.cancel()
                for pod in self._pods.values():
                    pod.signal(signal.SIGKILL)

    async def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """What the API server answers; None if there is no such thing."""
        data = None if body is None else json.dumps(body)
        async with self.session.request(
            method, self._server + path, data=data, headers={"Content-Type": kind}
        ) as answer:
            if answer.status in (404, 409):
                return None
            answer.raise_for_status()
            return await answer.json()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/exec/{namespace}/{pod}/{container}", self._exec)
        runner = web.AppRunner(app)
        await runner.setup()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._certificate)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self._port = runner.addresses[0][1]

    async def _register(self, node: Mapping[str, Any]) -> None:
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node["name"], "labels": node["labels"]}}
        await self.ask("POST", "/api/v1/nodes", body)
        await self._tell_ready(node)

    async def _tell_ready(self, node: Mapping[str, Any]) -> None:
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": now(),
        }
        status = {
            "capacity": node["capacity"],
            "allocatable": node["capacity"],
            "conditions": [condition],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            # with it the API server passes the client's WebSocket on, instead of translating it to SPDY
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
        }
        path = f"/api/v1/nodes/{node['name']}/status"
        await self.ask("PATCH", path, {"status": status}, "application/merge-patch+json")

    async def _beat(self) -> None:
        """Without it nodes would count as lost."""
        while True:
            for node in self._nodes.values():
                with suppress(aiohttp.ClientError):
                    await self._tell_ready(node)
            await asyncio.sleep(_HEARTBEAT)

    async def _watch(self) -> None:
        while True:
            with suppress(aiohttp.ClientError, asyncio.TimeoutError, ValueError):
                listed = await self.ask("GET", "/api/v1/pods")
                for pod in listed["items"]:
                    self._hear(pod)
                version = listed["metadata"]["resourceVersion"]
                url = f"{self._server}/api/v1/pods?watch=1&resourceVersion={version}"
                timeout = aiohttp.ClientTimeout(total=60)
                async with self.session.get(url, timeout=timeout, read_bufsize=1 << 22) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        self._hear(event["object"], event["type"] == "DELETED")
            await asyncio.sleep(0.1)

    def _hear(self, pod: dict[str, Any], deleted: bool = False) -> None:
        node = self._nodes.get(pod["spec"].get("nodeName", ""))
        if node is None:
            return
        uid = pod["metadata"]["uid"]
        known = self._pods.get(uid)
        if deleted:
            if known is not None:
                known.signal(signal.SIGKILL)
            return
        if known is None:
            if pod.get("status", {}).get("phase", "Pending") != "Pending":
                return
            known = self._pods[uid] = Pod(self, node, pod, self._env)
        if pod["metadata"].get("deletionTimestamp"):
            known.end(pod["metadata"].get("deletionGracePeriodSeconds", 30))

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["pod"]
        pod = next((p for p in self._pods.values() if p.name == name and p.pid), None)
        if pod is None:
            return web.Response(status=404, text="container not found")
        if "upgrade" not in request.headers.get("Connection", "").lower():
            return web.Response(status=400, text="an upgrade is expected")
        socket = web.WebSocketResponse(protocols=_PROTOCOLS, max_msg_size=0)
        await socket.prepare(request)
        process = await asyncio.create_subprocess_exec(
            *pod.entered(request.query.getall("command")), stdin=-1, stdout=-1, stderr=-1, start_new_session=True
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        reading = asyncio.create_task(_feed(socket, process.stdin))
        ended = asyncio.create_task(_drain(socket, process))
        await asyncio.wait([reading, ended], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():  # the client is gone: the program learns it by the end of its input
            with suppress(OSError):
                process.stdin.close()
            await asyncio.wait([ended])
        reading.cancel()
        await socket.close()
        return socket


async def _feed(socket: web.WebSocketResponse, stdin: asyncio.StreamWriter) -> None:
    async for message in socket:
        if message.type != WSMsgType.BINARY:
            continue
        channel, data = message.data[0], message.data[1:]
        with suppress(OSError):
            if channel == _STDIN:
                stdin.write(data)
                await stdin.drain()
            elif channel == _CLOSE and data[:1] == bytes([_STDIN]):
                stdin.close()


async def _drain(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    async def copy(stream: asyncio.StreamReader, channel: int) -> None:
        while data := await stream.read(1 << 16):
            with suppress(ConnectionError):
                await socket.send_bytes(bytes([channel]) + data)

    assert process.stdout
    assert process.stderr
    await asyncio.gather(copy(process.stdout, _STDOUT), copy(process.stderr, _STDERR))
    code = await process.wait()
    status: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code:
        cause = {"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}
        text = f"command terminated with non-zero exit code: exit status {code}"
        status = {
            "metadata": {},
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": text,
            "details": {"causes": [cause]},
        }
    with suppress(ConnectionError):
        await socket.send_bytes(bytes([_ERROR]) + json.dumps(status).encode())


class Pod:
    """One pod of a node."""

    def __init__(self, kubelet: Kubelet, node: Mapping[str, Any], pod: dict[str, Any], env: Mapping[str, str]) -> None:
        self._kubelet, self._node, self._pod, self._image_env = kubelet, node, pod, env
        self.name: str = pod["metadata"]["name"]
        self._namespace: str = pod["metadata"]["namespace"]
        self._container: dict[str, Any] = pod["spec"]["containers"][0]
        self.pid = 0
        self._started = ""
        self._ending = False
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run())]

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods/{self.name}"

    def entered(self, argv: list[str]) -> list[str]:
        """The command that runs this in the pod."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--", *self._as_user(), *argv]

    def signal(self, number: int) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, grace: float) -> None:
        if not self._ending:
            self._ending = True
            self._tasks.append(asyncio.create_task(self._end(grace)))

    async def _end(self, grace: float) -> None:
        if self.pid:
            self.signal(signal.SIGTERM)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), grace)
            self.signal(signal.SIGKILL)
            await self._over.wait()
        elif not self._over.is_set():
            self._tasks[0].cancel()
            await self._tell("Failed", {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}})
        uid = self._pod["metadata"]["uid"]
        await self._kubelet.ask("DELETE", self._path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})

    async def _run(self) -> None:
        if self._container["image"].startswith("missing"):
            why = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{self._container["image"]}"'}
            await self._tell("Pending", {"waiting": why})
            await self._over.wait()
        archive = await self._secrets()
        spec = self._pod["spec"]
        user = spec.get("securityContext", {})
        mounts = {mount["name"]: mount["mountPath"] for mount in self._container.get("volumeMounts", [])}
        own = [v["name"] for v in spec.get("volumes", []) if v.keys() & {"emptyDir", "secret"}]
        empty = [mounts[name] for name in own if name in mounts]
        argv = [*self._container.get("command", []), *self._container.get("args", [])]
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = ["sh", "-e", "-c", _START, "sh", " ".join(empty), str(user.get("fsGroup", 0))]
        process = await asyncio.create_subprocess_exec(
            *self._node["enter"], *enter, *script, *self._as_user(), *argv, stdin=-1, start_new_session=True
        )
        assert process.stdin
        process.stdin.write(archive)
        process.stdin.close()
        self._started = now()
        self.pid = await _descendant(process.pid, 2)
        await self._tell("Running", {"running": {"startedAt": self._started}})
        code = await process.wait()
        self.pid = 0
        state = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Error" if code else "Completed",
            "startedAt": self._started,
            "finishedAt": now(),
        }
        await self._tell("Failed" if code else "Succeeded", {"terminated": state})
        self._over.set()

    async def _secrets(self) -> bytes:
        """An archive of the files that the pod's Secrets are; waits until they exist."""
        made = io.BytesIO()
        group = self._pod["spec"].get("securityContext", {}).get("fsGroup", 0)
        with tarfile.open(fileobj=made, mode="w") as archive:
            for volume in self._pod["spec"].get("volumes", []):
                if "secret" not in volume:
                    continue
                path = f"/api/v1/namespaces/{self._namespace}/secrets/{volume['secret']['secretName']}"
                while (secret := await self._kubelet.ask("GET", path)) is None:
                    await asyncio.sleep(0.2)
                mount = next(m for m in self._container["volumeMounts"] if m["name"] == volume["name"])
                for name, text in secret["data"].items():
                    data = base64.b64decode(text)
                    entry = tarfile.TarInfo(f"{mount['mountPath']}/{name}")
                    entry.size, entry.mode, entry.gid = len(data), volume["secret"].get("defaultMode", 0o644), group
                    archive.addfile(entry, io.BytesIO(data))
        return made.getvalue()

    def _as_user(self) -> list[str]:
        """The beginning of a command: the pod's user, groups, rights and variables."""
        context = self._pod["spec"].get("securityContext", {})
        user, group = str(context.get("runAsUser", 0)), str(context.get("runAsGroup", 0))
        groups = [f"--groups={context['fsGroup']}"] if "fsGroup" in context else ["--clear-groups"]
        rights = ["--no-new-privs", "--bounding-set=-all"] if user != "0" else []
        env = {"PATH": _PATH, "HOME": "/", "HOSTNAME": self.name, **self._image_env, **self._variables()}
        words = [f"{name}={value}" for name, value in env.items()]
        return [
            "setpriv",
            f"--reuid={user}",
            f"--regid={group}",
            *groups,
            *rights,
            "--",
            "env",
            "-i",
            "-C",
            "/",
            *words,
        ]

    def _variables(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for entry in self._container.get("env", []):
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            labelled = source.partition("['")[2].rstrip("']")
            known = {**self._pod["metadata"].get("annotations", {}), **self._pod["metadata"].get("labels", {})}
            value = self.name if source == "metadata.name" else entry.get("value", "")
            found[entry["name"]] = known.get(labelled, "") if labelled else value
        return found

    async def _tell(self, phase: str, state: dict[str, Any]) -> None:
        """Patches the pod's status."""
        runs = phase == "Running"
        container = {
            "name": self._container["name"],
            "image": self._container["image"],
            "imageID": "",
            "ready": runs,
            "started": runs,
            "restartCount": 0,
            "state": state,
        }
        ready = {"status": "True" if runs else "False"}
        status: dict[str, Any] = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": self._node["address"],
            "podIPs": [{"ip": self._node["address"]}],
            "containerStatuses": [container],
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", **ready},
                {"type": "ContainersReady", **ready},
            ],
        }
        if self._started:
            status["startTime"] = self._started
        kind = "application/strategic-merge-patch+json"
        await self._kubelet.ask("PATCH", f"{self._path}/status", {"status": status}, kind)


async def _descendant(pid: int, depth: int) -> int:
    """The child of a child of a process, once it is there."""
    for _ in range(depth):
        while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            await asyncio.sleep(0.01)
        pid = int(children[0])
    return pid


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(Kubelet(json.loads(sys.stdin.buffer.readline())).run())


if __name__ == "__main__":
    main()
