"""Test hosts from the command line: `python -m tests.support.hosts up 3`, then `do h0 cut`, `status`, `down`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from .machine import KUBERNETES, SHELLS, SLURM, HostsError, install, unavailable
from .network import Network
from .runs import Run, runs, sweep

__all__ = ["main"]

_VERBS = {
    "host": """
        kill restart freeze thaw swap_host_key cut heal cut_client heal_client reset_client lossy slow
        bytes processes listeners open_ports
        """.split(),
    "net": "cut_client heal_client slow_client client_bytes counters".split(),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the words say; problems end in a sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.hosts", description="Real hosts on one machine, for tests."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make hosts, which stay until `down`")
    hold = commands.add_parser("hold", help="the same, until this process ends")
    for command in (up, hold):
        command.add_argument("count", type=int, nargs="?", default=2)
        command.add_argument("--private", action="store_true", help="a second network among the hosts")
        command.add_argument("--star", action="store_true", help="hosts do not reach each other")
        command.add_argument("--internet", action="store_true", help="hosts reach the world through a proxy")
    down = commands.add_parser("down", help="remove what `up` has made, and what dead runs have left behind")
    down.add_argument("number", nargs="?", type=int, help="this network only")
    commands.add_parser("status", help="what there is")
    commands.add_parser("install", help="install the system packages that hosts need")
    do = commands.add_parser("do", help="act on a host or on the network, as in `do h0 slow 10` or `do net cut_client`")
    do.add_argument("--network", type=int, help="its number; the last one made by `up` unless given")
    do.add_argument("what")
    do.add_argument("verb", choices=sorted({verb for verbs in _VERBS.values() for verb in verbs}))
    do.add_argument("value", nargs="?", type=int)
    words = parser.parse_args(argv)
    try:
        if words.command == "up":
            return _up(sys.argv[2:] if argv is None else argv[1:])
        if words.command == "hold":
            return _hold(
                Network(words.count, private=words.private, star=words.star, internet=words.internet, stays=True)
            )
        if words.command == "do":
            values = [] if words.value is None else [words.value]
            return _do(words.network, [words.what, words.verb, *values])
        if words.command == "down":
            return _down(words.number)
        return {"status": _status, "install": _install}[words.command]()
    except HostsError as exc:
        print(exc, file=sys.stderr)
        return 1


def _up(options: Sequence[str]) -> int:
    """Leaves a process behind that holds the hosts, and says how to reach them."""
    argv = [sys.executable, "-m", "tests.support.hosts", "hold", *options]
    holder = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert holder.stdout
    if not holder.stdout.readline():
        return holder.wait()
    for run in runs():
        if run.owner == holder.pid:
            _show(run)
    return 0


def _hold(network: Network) -> int:
    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with network, socket.socket(socket.AF_UNIX) as control:
        control.bind(str(network.directory / "ssh" / "control"))  # that directory is ours alone
        control.listen()
        print("ready", flush=True)
        _close_output()
        while True:
            with control.accept()[0] as caller, caller.makefile("rw") as stream:
                what, verb, *values = json.loads(stream.readline())
                stream.write(json.dumps(_act(network, what, verb, values)) + "\n")


def _close_output() -> None:
    """Lets go of the terminal or pipe of whoever has started us."""
    with open(os.devnull, "w") as nothing:
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)


def _act(network: Network, what: str, verb: str, values: Sequence[int]) -> str:
    hosts = {host.name: host for host in network.hosts}
    if what not in ("net", *hosts):
        return f"There is no {what}; there are net, {', '.join(hosts)}."
    kind, target = ("net", network) if what == "net" else ("host", hosts[what])
    if verb not in _VERBS[kind]:
        return f"{what} cannot {verb}; it can {', '.join(_VERBS[kind])}."
    try:
        answer = getattr(target, verb)(*values)
    except Exception as exc:  # whoever asked sees it
        return f"{type(exc).__name__}: {exc}"
    return "done" if answer is None else str(answer)


def _do(number: int | None, words: Sequence[str | int]) -> int:
    found = _staying(number)
    if not found:
        raise HostsError("There are no hosts from `up`; make some with `python -m tests.support.hosts up 3`.")
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(found[-1].directory / "ssh" / "control"))
        control.sendall(json.dumps(words).encode() + b"\n")
        print(json.loads(control.makefile().readline()))
    return 0


def _down(number: int | None) -> int:
    ours = _staying(number)
    for run in ours:
        os.kill(run.owner, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while any(run.alive for run in ours):
        if time.monotonic() > deadline:
            raise HostsError(
                f"The hosts of process {[r.owner for r in ours]} did not go within 30 s; end it with kill -9."
            )
        time.sleep(0.02)
    swept = sweep()
    print(f"Removed {len(ours)} network(s) made by `up`, and what {len(swept)} dead run(s) had left behind.")
    return 0


def _staying(number: int | None) -> list[Run]:
    return [run for run in runs() if run.stays and run.alive and number in (None, run.number)]


def _status() -> int:
    print(unavailable() or "Test hosts can be made on this machine.")
    for run in runs():
        _show(run)
    return 0


def _shells() -> list[str]:
    """Installs shells for the tests of completion, which are skipped with a reason where they cannot be had."""
    try:
        return install(SHELLS)
    except HostsError as exc:
        print(f"Completion in zsh and fish will not be tested: {exc}")
        return []


def _install() -> int:
    made = [*install(), *install(SLURM), *install(KUBERNETES), *_shells()]
    print(f"Installed {', '.join(made) or 'nothing: all is there'}.")
    return 0


def _show(run: Run) -> None:
    state = ("made by `up`" if run.stays else "of a test run") if run.alive else "left behind, `down` removes it"
    print(f"Network {run.number}: {state}, process {run.owner}")
    for name, address in run.addresses.items():
        print(f"  {name}  {address}  ssh -F {run.directory}/ssh/config {name}")


if __name__ == "__main__":
    raise SystemExit(main())
