"""`sky doctor`: checks this computer: requirements, logins, leftovers of earlier pools."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from skyward.cli.common import add_command, add_json, print_findings, print_json
from skyward.setup.checks.findings import Finding
from skyward.setup.env.uv import find_uv

__all__ = ["add", "findings", "run"]

_FILES = 4096
_GIGABYTE = 1 << 30
_TOKENS = ("HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN")
_found = partial(Finding, "")  # on no host: here


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "doctor",
        "check this computer",
        "Checks this computer: Python, ssh, uv, limits, disk space, which logins are found and where, the "
        "settings of this project, and what earlier pools have left. Nothing is changed, and no secret is shown.",
        ["sky doctor", "sky doctor --json", "sky doctor --kubernetes", "sky doctor --kubernetes --namespace research"],
        "exit status: 0 if pools can be opened from here, 1 if something is wrong.",
        shape="one list of objects: what, state (ok, warning, problem), text, do (what to do, or empty).",
    )
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="check the cluster that kubectl uses instead: version, your permissions, whether it takes a Job, nodes",
    )
    parser.add_argument("--context", metavar="NAME", help="which of kubectl's contexts (default: the current one)")
    parser.add_argument("--namespace", metavar="NAME", help="which namespace there (default: the context's own)")
    add_json(parser)
    parser.set_defaults(run=run, refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    where = arguments.context, arguments.namespace
    if not arguments.kubernetes and any(where):
        arguments.refuse("--context and --namespace are for --kubernetes.")
    found = list(_kubernetes(*where) if arguments.kubernetes else findings(os.environ))
    if arguments.json:
        print_json([{"what": f.what, "state": f.state, "text": f.text, "do": f.do} for f in found])
    else:
        print_findings(found)
    return 1 if any(finding.state == "problem" for finding in found) else 0


def findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    for look in (_python, _system, _ssh, _uv, _limits, _disks, _logins, _settings, _leftovers):
        yield from look(environ)


def _python(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield _found("python", "ok", f"{platform.python_version()} at {sys.executable}")  # an older one does not get here


def _system(environ: Mapping[str, str]) -> Iterator[Finding]:
    if sys.platform.startswith("linux"):
        yield _found("system", "ok", platform.platform())
    else:
        yield _found("system", "warning", platform.platform(), "Nodes on this computer need Linux; hosts and AWS work")


def _ssh(environ: Mapping[str, str]) -> Iterator[Finding]:
    said = _said("ssh", "-V")
    if said is None:
        yield _found("ssh", "warning", "there is no ssh program", "Install the OpenSSH client, for hosts and clouds")
        return
    yield _found("ssh", "ok", said)
    socket = environ.get("SSH_AUTH_SOCK")
    keys = _said("ssh-add", "-l") if socket else None
    count = len([line for line in (keys or "").splitlines() if "SHA256:" in line])
    found = f"an agent with {count} key{'' if count == 1 else 's'}" if socket else "no agent"
    files = sorted(path.stem for path in Path.home().glob(".ssh/id_*.pub"))
    yield _found("ssh keys", "ok" if count or files else "warning", f"{found}; in ~/.ssh: {', '.join(files) or 'none'}")


def _uv(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        said = _said(find_uv(), "--version")
    except (ImportError, FileNotFoundError):
        said = None
    if said is None:
        yield _found("uv", "problem", "it does not run", f"Install it: {sys.executable} -m pip install uv")
    else:
        yield _found("uv", "ok", said)


def _limits(environ: Mapping[str, str]) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = 0 <= files < _FILES
    what = "no limit of" if files < 0 else f"{files}"
    yield _found("limits", "warning" if few else "ok", f"{what} open files", "Raise it: ulimit -n 4096" if few else "")


def _disks(environ: Mapping[str, str]) -> Iterator[Finding]:
    cache = Path(environ.get("SKYWARD_CACHE") or Path.home() / ".cache" / "skyward")
    for what, path, least in (("cache", cache, _GIGABYTE), ("memory", Path("/dev/shm"), _GIGABYTE // 4)):
        there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
        if there is None or (what == "memory" and there != path):
            continue
        free = shutil.disk_usage(there).free
        do = f"Free some space in {there}" if free < least else ""
        yield _found(what, "warning" if free < least else "ok", f"{free / _GIGABYTE:.1f} GB free in {path}", do)


def _logins(environ: Mapping[str, str]) -> Iterator[Finding]:
    places = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE") if environ.get(name)]
    places += [f"~/.aws/{name}" for name in ("credentials", "config") if (Path.home() / ".aws" / name).exists()]
    yield _found(
        "aws", "ok" if places else "warning", f"a login in {', '.join(places)}" if places else "no login found"
    )
    tokens = [name for name in _TOKENS if environ.get(name)]
    if tokens:
        yield _found("tokens", "ok", f"{', '.join(tokens)} set", "Nodes get one as sky.Secret.from_env(...)")


def _settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    from skyward.errors import SkywardError
    from skyward.pool.settings import find_settings

    try:
        found = find_settings()
    except SkywardError as exc:
        yield _found("settings", "problem", str(exc))
        return
    if found is None:
        yield _found("settings", "ok", "none in this folder or above it", "`sky init` writes some")
    else:
        yield _found("settings", "ok", f"{found.path}, pools: {', '.join(found.pools) or 'none'}")


def _leftovers(environ: Mapping[str, str]) -> Iterator[Finding]:
    from skyward.machines.ledger import histories, in_use

    left = [history.pool for history in histories() if not in_use(history.pool)]
    if left:
        yield _found(
            "leftovers", "warning", f"of {', '.join(left)}", "`sky ps` shows them, `sky down --all --yes` ends them"
        )
    else:
        yield _found("leftovers", "ok", "none that this computer knows of")


def _kubernetes(context: str | None, namespace: str | None) -> Iterator[Finding]:
    from skyward.api.spec import Spec
    from skyward.errors import SkywardError
    from skyward.providers.kubernetes.provider import Kubernetes, may_execute, minor_version
    from skyward.setup.kubectl import Kubectl, find_kubectl

    try:
        said = _said(find_kubectl(), "version", "--client") or "it does not run"
        yield _found("kubectl", "ok", f"{said.splitlines()[0]} at {find_kubectl()}")
        kubectl, site = Kubectl.find(context, namespace), Kubernetes(context=context, namespace=namespace)
        where = f"{kubectl.where}, Kubernetes 1.{minor_version(kubectl)}, namespace {kubectl.namespace}"
        yield _found("cluster", "ok", where)
        if may_execute(kubectl):
            yield _found("rights", "ok", "all that a pool needs")
        else:
            text = "all but pods/exec: pods would have to connect to this computer"
            yield _found("rights", "warning", text, "Have it allowed, or run your program in a pod")
        site.rehearse()
        yield _found("job", "ok", "the cluster would take a pool's Job")
        for offer in site.offers(Spec(), 1):
            yield _found("nodes", "ok", offer.name)
    except SkywardError as exc:
        yield _found("cluster", "problem", str(exc))


def _said(*command: str, run: Callable[..., Any] = subprocess.run) -> str | None:
    try:
        done = run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return str(done.stdout or done.stderr).strip()
