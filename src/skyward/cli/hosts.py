"""`sky hosts check`: finds problems on hosts and between them before a pool is opened there."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from skyward.cli.common import add_command, add_json, print_findings, print_json
from skyward.errors import InvalidArgument

if TYPE_CHECKING:
    from skyward.providers.ssh import SSH
    from skyward.setup.checks.check import Wanted
    from skyward.setup.checks.findings import Finding

__all__ = ["add", "indexes", "run"]

_PYPI = "https://pypi.org/simple/"
_LOGIN = re.compile(r"//[^/@]*@")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "hosts",
        "check hosts before opening a pool there",
        "Logs in to hosts as a pool would, all at once, and reports what would go wrong: ssh, Python, disk, memory, "
        "limits, GPUs and drivers, clocks, package indexes, the network between the hosts, and who else uses "
        "them. A problem stops a pool; a warning is worth knowing. Nothing is installed or left there.",
        [
            "sky hosts check gpu1 user@10.0.0.7:2222",
            "sky hosts check --pool lab",
            "sky hosts check gpu1 --key ~/.ssh/lab --accept-new",
            "sky hosts check gpu1 gpu2 --json | jq 'select(.state != \"ok\")'",
        ],
        "exit status: 0 if pools can be opened there, 1 if there is a problem, 2 for a wrong command line.",
        "one object per line for each finding, with host, what, state (ok, warning, problem), text and do.",
    )
    parser.usage = "sky hosts check [OPTIONS] HOST..."
    parser.add_argument("action", choices=["check"], help="the only action so far")
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="as ssh takes it, or user@host:port")
    parser.add_argument("--pool", metavar="NAME", help="the hosts of a pool of sky.toml or pyproject.toml")
    parser.add_argument("--config", metavar="FILE", help="another file with settings")
    parser.add_argument("--user", metavar="NAME", help="the user, for hosts that do not name one")
    parser.add_argument("--port", type=int, metavar="N", help="the port of sshd, for hosts that do not name one")
    parser.add_argument("--key", metavar="FILE", help="a private key")
    parser.add_argument("--known-hosts", metavar="FILE", help="the file with host keys")
    parser.add_argument("--accept-new", action="store_true", help="trust a host that is seen for the first time")
    parser.add_argument("--python", metavar="X.Y", help="the version that pools need (default: this one)")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds for a login (default: 10)")
    add_json(parser)
    parser.set_defaults(run=run, refuse=parser.error)
    _allow_mixed(parser)


def _allow_mixed(parser: argparse.ArgumentParser) -> None:
    """Allows hosts between and after options, which argparse does not."""
    plain = parser.parse_known_args

    def parse(args: Sequence[str], namespace: argparse.Namespace | None = None) -> Any:
        vars(parser)["parse_known_args"] = plain  # it is what the other one calls
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            vars(parser)["parse_known_args"] = parse

    vars(parser)["parse_known_args"] = parse


def run(arguments: argparse.Namespace) -> int:
    from skyward.setup.checks.check import check

    provider, wanted = _wanted(arguments)
    names = [str(host) if isinstance(host, str) else host.host for host in provider.hosts]
    found = check(dict(zip(names, provider.targets, strict=True)), wanted)
    if arguments.json:
        for finding in found:
            print_json(finding)
    else:
        _print(found, len(names))
    return 1 if any(finding.state == "problem" for finding in found) else 0


def indexes(environ: dict[str, str], more: Sequence[str] = ()) -> tuple[str, ...]:
    from skyward.setup.env.uv import uv_environment

    variables = {**environ, **uv_environment(environ)}
    named = variables.get("UV_DEFAULT_INDEX") or variables.get("UV_INDEX_URL") or _PYPI
    others = (variables.get("UV_INDEX") or variables.get("UV_EXTRA_INDEX_URL") or "").split()
    given = [named, *others, *more]
    found = [_LOGIN.sub("//", url.rpartition("=")[2] if "=http" in url else url) for url in given]
    return tuple(dict.fromkeys(url for url in found if re.match(r"https?://[^\s]+$", url)))


def _wanted(arguments: argparse.Namespace) -> tuple[SSH, Wanted]:
    """Exits with status 2 if the command line is wrong."""
    from skyward.providers.ssh import SSH
    from skyward.setup.checks.check import Wanted

    refuse: Callable[[str], NoReturn] = arguments.refuse
    python, mesh, named = sys.version_info[:2], False, ()
    if arguments.python is not None:
        number = re.fullmatch(r"(\d+)\.(\d+)", arguments.python)
        if number is None:
            refuse(f"--python {arguments.python}: write a version such as 3.12.")
        python = int(number[1]), int(number[2])
    if arguments.timeout <= 0:
        refuse(f"--timeout {arguments.timeout:g}: expected a number of seconds above zero.")
    if arguments.hosts and arguments.pool:
        refuse("name hosts or a pool, not both: the hosts of --pool are those of its settings.")
    if arguments.hosts:
        given = {name: getattr(arguments, name) for name in ("user", "port", "key", "known_hosts")}
        given = {name: value for name, value in given.items() if value is not None}
        keys = "accept-new" if arguments.accept_new else "strict"
        provider = SSH(hosts=arguments.hosts, host_keys=keys, **given)
    elif arguments.pool or arguments.config:
        provider, mesh, named = _of_pool(arguments)
    else:
        refuse("no host: name some, as in `sky hosts check gpu1 gpu2`, or a pool with --pool.")
    return provider, Wanted(python, indexes(dict(os.environ), named), mesh, arguments.timeout)


def _of_pool(arguments: argparse.Namespace) -> tuple[SSH, bool, Sequence[str]]:
    from skyward.pool.pool import ComputePool
    from skyward.providers.ssh import SSH

    pool = ComputePool.from_config(arguments.pool, path=arguments.config)
    provider = pool.provider
    if not isinstance(provider, SSH):
        raise InvalidArgument(
            f"pool {arguments.pool or 'by default'} has {provider.name}, not hosts of yours: this command is for "
            'provider = {kind = "ssh", hosts = [...]}. `sky doctor` looks at this computer.'
        )
    mesh = provider.network == "mesh" or any(plugin.around_app for plugin in pool.plugins)
    return provider, mesh, [index.url for index in pool.image.pip_indexes]


def _print(found: Sequence[Finding], hosts: int) -> None:
    print_findings(found)
    counts = [(sum(each.state == state for each in found), state) for state in ("problem", "warning")]
    told = " and ".join(f"{count} {state}{'' if count == 1 else 's'}" for count, state in counts if count)
    print(f"{hosts} host{'' if hosts == 1 else 's'}: {told or 'all is well'}")
