"""`sky ssh`: a shell or one command on a node of a running pool."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, print_json
from skyward.errors import InvalidArgument

if TYPE_CHECKING:
    from skyward.api.shell import SshTarget
    from skyward.events import NodePlaced
    from skyward.history.store import Entry

__all__ = ["add", "chosen_node", "pod_command", "run", "ssh_command", "target_of"]

_LOGIN = 15.0
_WRITTEN = 2.0  # seconds in which what has just happened is in the history
# Starts in the directory of bodies, with the Python that they run in first on the PATH.
_THERE = """cd "$1" 2>/dev/null || cd
[ -z "$2" ] || { PATH=$2/bin:$PATH VIRTUAL_ENV=$2; export PATH VIRTUAL_ENV; }
shift 2
[ $# -gt 0 ] || set -- "${SHELL:-sh}"
exec "$@"
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "ssh",
        "open a shell on a node of an open pool",
        "Opens a shell on a node of a pool that is open on this computer, with the pool's own user, port, key, host "
        "keys and route. It starts in the directory in which bodies start, with their Python first on the PATH; "
        "variables of sky.Image(env=...) are not set. With a COMMAND after -- it runs that instead; a single word with "
        "spaces in it is run by the shell there. It runs OpenSSH; for a pod `kubectl exec`; for a node of this "
        "computer, your own shell.",
        [
            "sky ssh",
            "sky ssh sweep 1",
            "sky ssh sweep gpu2 -- nvidia-smi",
            "sky ssh sweep 1 -- 'ls | wc -l'",
            "sky ssh sweep 1 --print        the command, for other programs",
        ],
        "exit status: that of the shell or command; 255 if ssh does not get in, 1 if there is no such node.",
        "one object with pool, node, machine, directory and command, the words to run; nothing is run.",
    )
    parser.usage = "sky ssh [OPTIONS] [POOL [NODE]] [-- COMMAND]"
    parser.add_argument("pool", nargs="?", metavar="POOL", help="its name, or the id that `sky history` shows")
    parser.add_argument("node", nargs="?", metavar="NODE", help="its number or its machine's name (default: 0)")
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")
    add_json(parser)
    parser.set_defaults(run=run, takes_rest=True)


def run(arguments: argparse.Namespace) -> int:
    from skyward.cli.common import chosen

    entry = chosen(arguments.pool)
    if not entry.running:
        raise InvalidArgument(
            f"{entry.pool} is no longer running, so it has no nodes. `sky ps` lists pools, `sky logs {entry.pool}` "
            "shows what it wrote."
        )
    place = chosen_node(entry.pool, _placed(entry), arguments.node)
    rest = list(arguments.rest)
    words = ["sh", "-c", rest[0]] if len(rest) == 1 and " " in rest[0].strip() else rest
    terminal, target = sys.stdin.isatty() and sys.stdout.isatty(), None
    if place.local:
        command = [*words] or [os.environ.get("SHELL") or "sh"]
    elif place.ssh:
        target = target_of(place.ssh)
        command = ssh_command(target, place, words, terminal)
    elif place.pod:
        command = pod_command(place, words, terminal)
    else:
        raise _no_ssh(entry.pool, place)
    if arguments.json:
        about = {"pool": entry.pool, "node": place.node, "machine": place.machine, "directory": place.directory}
        print_json({**about, "command": command})
        return 0
    if arguments.print:
        print(shlex.join(command))
        return 0
    return _become(command, place, target)


def chosen_node(pool: str, placed: Mapping[int, NodePlaced], name: str | None) -> NodePlaced:
    if not placed:
        raise InvalidArgument(f"{pool} has no nodes yet: it is being opened. `sky top {pool}` shows its progress.")
    if name is None:
        return placed[min(placed)]
    if name.isascii() and name.isdigit() and int(name) in placed:
        return placed[int(name)]
    found = [place for place in placed.values() if name in (place.machine, place.machine.rpartition("@")[2])]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node} ({place.machine})" for node, place in sorted(placed.items())[:20])
    why = f"{pool} has {len(found)} nodes on {name}: say which" if found else f"{pool} has no node {name}"
    raise InvalidArgument(f"{why}. There are: {known}.")


def ssh_command(target: SshTarget, place: NodePlaced, words: Sequence[str], terminal: bool) -> list[str]:
    from skyward.setup.ssh.connection import options, remote_line

    first = ["-t", "-o", "EscapeChar=~"] if terminal else ["-T"]
    line = remote_line(["sh", "-c", _THERE, "sky", place.directory, place.environment, *words])
    return ["ssh", *first, *options(target, _LOGIN), "-S", "none", "--", target.host, line]


def pod_command(place: NodePlaced, words: Sequence[str], terminal: bool) -> list[str]:
    from skyward.api.shell import PodTarget
    from skyward.setup.kubectl import Kubectl
    from skyward.setup.pods import CONTAINER

    known = {field.name: place.pod[field.name] for field in fields(PodTarget) if field.name in place.pod}
    target = PodTarget(**known)
    where = "-it" if terminal else "-i", f"pod/{target.pod}", f"--container={CONTAINER}"
    there = "sh", "-c", _THERE, "sky", place.directory, place.environment
    return Kubectl(target.namespace, target.context).words("exec", *where, "--", *there, *words)


def target_of(found: Mapping[str, Any]) -> SshTarget:
    from skyward.api.shell import SshTarget
    from skyward.providers.ssh import parse_host

    known = {field.name: found[field.name] for field in fields(SshTarget) if field.name in found}
    known["proxy_logins"] = tuple(map(str, known.get("proxy_logins") or ()))
    target = SshTarget(**known)
    parse_host(f"[{target.host}]")  # no option of ssh, and nothing for a shell
    return target


def _placed(entry: Entry) -> dict[int, NodePlaced]:
    """Only these lines are parsed, since histories may be large."""
    from skyward.events import NodePlaced
    from skyward.history.lines import parsed

    found: dict[int, NodePlaced] = {}
    until = time.monotonic() + _WRITTEN
    while not found and time.monotonic() < until:
        with entry.path.open("rb") as file:
            for line in file:
                if b'"NodePlaced"' in line and isinstance(event := parsed(line), NodePlaced):
                    found[event.node] = event
        if not found:
            time.sleep(0.1)
    return found


def _no_ssh(pool: str, place: NodePlaced) -> InvalidArgument:
    text = (
        f"node {place.node} of {pool} is on {place.machine}, which has connected to this computer itself: ssh is not "
        "the way there. "
    )
    if place.shell_command:
        return InvalidArgument(f"{text}Run this where Slurm's commands work: {place.shell_command}")
    return InvalidArgument(
        f"{text}Log in to it as you did to start it there, or run programs in bodies: subprocess.run(...) inside a "
        "@sky.compute function, or `sky exec` in a pool of its own."
    )


def _become(command: Sequence[str], place: NodePlaced, target: SshTarget | None) -> int:
    from skyward.api.secret import ssh_environment
    from skyward.setup.ssh.connection import would_send

    env = dict(os.environ)
    if place.local:
        if place.environment:
            env |= {"VIRTUAL_ENV": place.environment, "PATH": f"{place.environment}/bin:{env.get('PATH', os.defpath)}"}
        try:
            os.chdir(place.directory)
        except OSError as exc:
            print(f"sky: {place.directory}: {exc.strerror}; the shell starts here instead.", file=sys.stderr)
    elif target is not None:
        kept = would_send(target)
        env = {k: v for k, v in ssh_environment(os.environ, target.proxy_logins).items() if k not in kept}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), env)
    except FileNotFoundError:
        missing = "there is no such program on this computer. Install "
        what = "no such program" if place.local else missing + ("the OpenSSH client" if target else "kubectl")
        print(f"sky: {command[0]}: {what}.", file=sys.stderr)
        return 127
