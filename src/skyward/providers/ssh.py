"""Machines that the user can log in to by ssh: as many nodes as hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args
from urllib.parse import unquote

from skyward.api.image import check_number, check_one_of
from skyward.api.provider import Availability, Lease, Machine, Offer, Provider, Report
from skyward.api.shell import Access, SshTarget
from skyward.api.spec import Spec
from skyward.api.usage_errors import FOR_HOSTS, corrects
from skyward.errors import InvalidArgument
from skyward.node.run_folder import RUN

__all__ = ["SSH", "login_target", "parse_host"]

HostKeys = Literal["strict", "accept-new"]
Network = Literal["auto", "mesh", "star"]

# What ssh itself refuses in names that come from elsewhere: they may end up in a ProxyCommand, which a shell reads.
_UNSAFE = re.compile(r"""[\s,'"`$\\;&<>|(){}\x00-\x1f\x7f]""")
_PUBLIC = re.compile(rb"(?:ssh|ecdsa|sk)-\S+ \S+")
_SHOWN = 4


def parse_host(text: str) -> tuple[str | None, str, int | None]:
    """ "gpu1", "user@10.0.0.7:2222", "[2001:db8::1]:22" or "ssh://user@host:port"."""
    if not isinstance(text, str):
        raise InvalidArgument(
            f"login={text!r} is not a host. Write it like 'login.example.org' or 'user@10.0.0.7:2222'."
        )
    rest, url = (text[6:].rstrip("/"), True) if text.lower().startswith("ssh://") else (text, False)
    user, at, place = rest.rpartition("@")
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", place)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
    elif place.count(":") == 1:
        host, _, port = place.partition(":")
    else:
        host, port = place, None  # an alias, a name, or an IPv6 address without a port
    user = unquote(user) if url else user
    for what, name in (("user", user), ("host", host)):
        if (what == "host" or at) and not name:
            raise InvalidArgument(f"hosts: {text!r} names no {what}. Write it like 'gpu1' or 'user@10.0.0.7:2222'.")
        _check_name(what, name, f"hosts: {text!r}")
    if "/" in host:
        raise InvalidArgument(f"hosts: {text!r} holds a path. Give the machine alone, like 'user@10.0.0.7:2222'.")
    return user or None, host, None if port is None else _port(port, f"hosts: {text!r}")


def login_target(login: str | SshTarget | None) -> SshTarget | None:
    if login is None or isinstance(login, SshTarget):
        return login
    user, host, port = parse_host(login)
    return SshTarget(host, user, port)


@corrects(FOR_HOSTS, 'sky.SSH(hosts=["gpu1", "gpu2"])')
@dataclass(frozen=True, repr=False)
class SSH(Provider):
    """Your own hosts, as nodes.

    Args:
        hosts: names, addresses or aliases of ~/.ssh/config, each as `ssh` takes it, or "user@host:port"; one per node.
        user: who logs in, where a host does not say. Default: as ssh's settings say.
        port: the port of sshd, where a host does not say. Default: as ssh's settings say, else 22.
        key: the path of a private key, where a host does not say. Default: your agent's, or as ssh's settings say.
        host_keys: "strict": host keys must be known to ssh already; "accept-new": a host is trusted at first sight.
            Default: "strict".
        known_hosts: the file with the keys of hosts. Default: ssh's own, ~/.ssh/known_hosts.
        network: whether hosts reach each other: "auto" finds out, "mesh" requires it, "star" does without. Default:
            "auto".
        ssh_timeout: seconds for which a silent host is tried; one that refuses connections is tried for 10. Default:
            60.
        lease: seconds for which hosts continue without hearing from you; then they end everything. Default: 900.
    """

    hosts: Sequence[str | SshTarget]
    user: str | None = None
    port: int | None = None
    key: str | os.PathLike[str] | None = None
    host_keys: HostKeys = "strict"
    known_hosts: str | os.PathLike[str] | None = None
    network: Network = "auto"
    ssh_timeout: float = 60.0
    lease: float = 900.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", _host_list(self.hosts))
        if self.user is not None:
            if not isinstance(self.user, str) or not self.user:
                raise InvalidArgument(f"user={self.user!r}: expected the name of a user.")
            _check_name("user", self.user, f"user={self.user!r}")
        if self.port is not None:
            _port(str(self.port), f"port={self.port!r}")
        check_one_of("host_keys", self.host_keys, get_args(HostKeys))
        check_one_of("network", self.network, get_args(Network))
        check_number("ssh_timeout", self.ssh_timeout, whole=False)
        check_number("lease", self.lease, whole=False)
        if RUN not in os.environ:  # the program of a detached run has its machines, and logs in nowhere
            for target in self.targets:
                _check_key(target.key)
                _check_known_hosts(target)
        _check_different(self.targets)

    @cached_property
    def targets(self) -> tuple[SshTarget, ...]:
        return tuple(self._target(host) for host in self.hosts)

    @property
    def default_nodes(self) -> int:
        return len(self.hosts)

    @property
    def access(self) -> Access:
        return Access(self.lease, self.ssh_timeout, self.network, detaches=True, stays=True)

    def __repr__(self) -> str:
        names = [repr(str(host)) for host in self.hosts]
        shown = names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], f"... {len(names) - _SHOWN + 1} more"]
        settings = [(field.name, getattr(self, field.name), field.default) for field in fields(self)[1:]]
        rest = [f"{name}={value!r}" for name, value, default in settings if value != default]
        hosts = ", ".join(shown)
        return f"SSH({', '.join([f'hosts=[{hosts}]', *rest])})"

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        self._check_count(count)
        return [Offer("1 host" if len(self.hosts) == 1 else f"{len(self.hosts)} hosts")]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return [Availability("not asked; `sky hosts check` looks at hosts") for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        """Makes no connection."""
        self._check_count(count)
        return Lease(self, pool, [Machine(_identity(target), ssh=target) for target in self.targets[:count]])

    def _check_count(self, count: int) -> None:
        if count > len(self.hosts):
            raise InvalidArgument(
                f"nodes={count}, but SSH names {len(self.hosts)} host(s): {', '.join(map(str, self.hosts))}. "
                "Name more hosts, or ask for fewer nodes."
            )

    def _target(self, host: str | SshTarget) -> SshTarget:
        given = host if isinstance(host, SshTarget) else SshTarget("", host_keys=self.host_keys)
        if isinstance(host, str):
            user, name, port = parse_host(host)
            given = replace(given, host=name, user=user, port=port)
        return replace(
            given,
            user=given.user or self.user,
            port=given.port or self.port,
            key=_path(given.key or self.key),
            known_hosts=_path(given.known_hosts or self.known_hosts),
        )


def _host_list(hosts: Any) -> tuple[str | SshTarget, ...]:
    if isinstance(hosts, str | SshTarget):
        raise InvalidArgument(
            f"hosts={str(hosts)!r} is one host; expected a list, even for one: hosts=[{str(hosts)!r}]."
        )
    if not isinstance(hosts, Sequence):
        raise InvalidArgument(f"hosts={hosts!r}: expected a list, since the order of hosts is that of the nodes.")
    if not hosts:
        raise InvalidArgument(f"hosts={hosts!r}: name at least one host, like hosts=['gpu1', 'user@10.0.0.7:2222'].")
    for host in cast("Sequence[Any]", hosts):
        if isinstance(host, SshTarget) and host.host:
            _check_name("host", host.host, f"hosts: {host.host!r}")
            _check_name("user", host.user or "", f"hosts: {str(host)!r}")
        elif not isinstance(host, str):  # nor is a target without a host
            raise InvalidArgument(f"hosts: {host!r} is not a host. Write it like 'gpu1' or 'user@10.0.0.7:2222'.")
    return tuple(cast("Sequence[str | SshTarget]", hosts))


def _check_name(what: str, name: str, where: str) -> None:
    unsafe = _UNSAFE.search(name)
    if unsafe:
        raise InvalidArgument(f"{where}: a {what} cannot have {unsafe[0]!r} in its name. Write one host per entry.")
    if name.startswith("-"):
        raise InvalidArgument(f"{where}: a {what} cannot begin with '-': ssh would take it for an option.")


def _port(port: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise InvalidArgument(f"{where}: {port!r} is not a port. Give a number from 1 to 65535.")
    return int(port)


def _path(path: str | os.PathLike[str] | None) -> str | None:
    if path is not None and not isinstance(path, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise InvalidArgument(f"{path!r} is not the path of a file. Give one as a text, like '~/.ssh/id_ed25519'.")
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _check_key(key: str | None) -> None:
    if key is None:
        return
    try:
        with open(key, "rb") as file:
            stat, first = os.fstat(file.fileno()), file.read(100)
    except OSError as exc:
        raise InvalidArgument(f"key={key!r} cannot be read: {exc.strerror}. Give the path of a private key.") from None
    if _PUBLIC.match(first):
        private = key.removesuffix(".pub")
        raise InvalidArgument(f"key={key!r} is a public key. Give the private one that belongs to it: key={private!r}.")
    if b"PRIVATE KEY" not in first:
        raise InvalidArgument(f"key={key!r} holds no private key. Give the path of one, like '~/.ssh/id_ed25519'.")
    if stat.st_uid == os.geteuid() and stat.st_mode & 0o077:
        raise InvalidArgument(f"key={key!r} can be read by others, so ssh would not use it. Run: chmod 600 {key}")


def _check_known_hosts(target: SshTarget) -> None:
    path = target.known_hosts
    if path is None:
        return
    if '"' in path:
        raise InvalidArgument(f"known_hosts={path!r}: ssh cannot take a path with a double quote in it.")
    if target.host_keys == "strict" and not os.access(path, os.R_OK):
        raise InvalidArgument(f"known_hosts={path!r} cannot be read, and no host is known without it. Check the path.")


def _check_different(targets: Sequence[SshTarget]) -> None:
    seen: set[tuple[str, int | None]] = set()
    for target in targets:
        place = (target.host.lower(), target.port)
        if place in seen:
            raise InvalidArgument(f"hosts: {_identity(target)!r} is named twice. Each host is one node: name it once.")
        seen.add(place)


def _identity(target: SshTarget) -> str:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return (f"{target.user}@" if target.user else "") + host + (f":{target.port}" if target.port else "")
