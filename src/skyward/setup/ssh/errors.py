"""Why ssh could not connect: from its output to a message that says what to do next."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass

from skyward.api.shell import SshTarget
from skyward.errors import AuthenticationFailed, BootstrapError, HostKeyMismatch, HostUnreachable

__all__ = ["by_hand", "cause_of", "explain", "summary"]


@dataclass(frozen=True)
class Cause:
    pattern: str
    error: type[BootstrapError]
    tries: int | None
    words: str
    lasting: float = math.inf
    """Seconds after which it is final if nothing else happens; longer for machines that boot for the first time."""


_KEY = "Give the right one with key=..., or add it to your agent with ssh-add (a key with a passphrase must be there)"
_NEVER = Cause("", BootstrapError, 1, "ssh ended without a connection.")

# The first that matches counts. Patterns begin where ssh begins its lines: what a host says in a banner must not be
# taken for the reason. "Connection closed" stands near the end: it also follows when a jump host fails on its own.
_CAUSES = (
    Cause(
        r"^Host key for (.+) has changed and you have requested strict checking",
        HostKeyMismatch,
        1,
        "its host key is not the one in your known_hosts file. Either the machine was installed again, or another one "
        "answers in its place. Nothing was sent to it. If you know that the key has changed, remove the old one with "
        "'ssh-keygen {file}-R {0}', connect once by hand and compare the fingerprint.",
    ),
    Cause(
        r"REVOKED HOST KEY DETECTED!",
        HostKeyMismatch,
        1,
        "its host key is marked as revoked in your known_hosts file. Nothing was sent to it. "
        "Ask whoever runs the machine for its new key.",
    ),
    Cause(
        r"^No .*host key is known for (.+) and you have requested strict checking|^Host key verification failed",
        HostKeyMismatch,
        1,
        "its host key is not known yet, so that nothing tells it from an impostor. Connect once by hand and compare "
        'the fingerprint, or give host_keys="accept-new" to trust each host at first sight.',
    ),
    Cause(
        r"^ssh: Could not resolve hostname (\S+): (?:Temporary failure in name resolution|.*[Tt]ry again)",
        HostUnreachable,
        None,
        "no name server answered for '{0}'. This computer may be offline.",
    ),
    Cause(
        r"^ssh: Could not resolve hostname (\S+): ",
        HostUnreachable,
        2,
        "'{0}' is not a known name of a machine. Check the spelling; a short name needs a Host entry in ~/.ssh/config.",
    ),
    Cause(
        r"^Bad owner or permissions on (.+)$",
        BootstrapError,
        1,
        "ssh does not trust {0}, since others may write to it. Run: chmod 600 {0}",
    ),
    Cause(
        r"^.+ line \d+: .*(?:[Bb]ad|[Uu]nsupported|[Ii]nvalid|[Mm]issing|extra)|: terminating, \d+ bad|^Bad (?:S|p)",
        BootstrapError,
        1,
        "ssh does not understand its settings. Correct the line that it names.",
    ),
    Cause(
        r"Too many authentication failures",
        AuthenticationFailed,
        1,
        "it hung up after too many keys, before the right one came. Your agent holds many: name one with key=...",
    ),
    Cause(
        r"^Load key \"(.+)\": bad permissions|^Permissions \d+ for '(.+)' are too open",
        AuthenticationFailed,
        1,
        "the key {0} was not used, since others on this computer may read it. Run: chmod 600 {0}",
    ),
    Cause(
        r"^Load key \"(.+)\": (?:invalid format|error in libcrypto|.*not a .*key)",
        AuthenticationFailed,
        1,
        "{0} is not a private key that ssh can read. " + _KEY + ".",
    ),
    Cause(
        r"^(\S+)@\S+: Permission denied \((.+)\)",
        AuthenticationFailed,
        1,
        "it knows no user '{0}' with {key} (it takes: {1}). "
        + _KEY
        + "; it must be in ~/.ssh/authorized_keys of that user. Is user=... right?",
    ),
    Cause(
        r"^ssh: connect to host (\S+) port (\d+): Connection refused",
        HostUnreachable,
        None,
        "nothing listens on port {1} of {0}: the connection was refused. The machine is on, so its sshd either uses "
        "another port (write '{0}:PORT', or give port=...) or does not run.",
        lasting=10.0,
    ),
    Cause(
        r"^ssh: connect to host (\S+) port (\d+): (?:No route to host|Network is unreachable|Host is down)",
        HostUnreachable,
        None,
        "there is no way to {0} from here. The machine may be off, or a VPN may be needed.",
    ),
    Cause(
        r"(?:Connection|Operation) timed out|^Connection to .* timed out|^Timeout, server",
        HostUnreachable,
        None,
        "it did not answer in time. The machine may be off or still starting, or a firewall drops what is sent to it.",
    ),
    Cause(
        r"^Unable to negotiate with .*: (no matching .+ found)",
        BootstrapError,
        1,
        "ssh here and sshd there have no method in common ({0}). One of them is very old, or its settings forbid it.",
    ),
    Cause(
        r"^(?:kex|ssh)_exchange_identification: |^banner exchange: |^Connection (?:closed|reset) by |"
        r"^Not allowed|^Received disconnect",
        HostUnreachable,
        None,
        "the connection was closed before the login. The machine may still be starting, its sshd may have too many "
        "visitors (MaxStartups), or a jump host or ProxyCommand on the way does not work.",
    ),
    Cause(
        r"^skyward: closed",
        BootstrapError,
        1,
        "the connection was closed by this program while it was being made.",
    ),
    Cause(
        r"account is currently not available|^skyward: no answer after the login",
        BootstrapError,
        1,
        "the login worked, but no program can be run there. The user needs a shell that takes commands, and the key no "
        "forced command.",
    ),
)


def cause_of(said: str) -> Cause:
    return _match(said)[0]


def explain(said: str, target: SshTarget) -> BootstrapError:
    cause, found = _match(said)
    values = [value for value in (found.groups() if found else ()) if value]
    key = f"the key {target.key}" if target.key else "any key of your agent or of ~/.ssh"
    file = f"-f {shlex.quote(target.known_hosts)} " if target.known_hosts else ""
    words = cause.words.format(*values, key=key, file=file)
    last = "\n".join(_sentences(said)[-3:])
    return cause.error(f"ssh {target}", f"{words}\nssh said: {last or 'nothing'}\nTo try by hand: {by_hand(target)}")


def summary(said: str) -> str:
    return next(reversed(_sentences(said)), "no answer").removeprefix("ssh: ").rstrip(".")


def by_hand(target: SshTarget) -> str:
    argv = ["ssh"]
    argv += [] if target.config else ["-F", "none"]
    argv += ["-i", target.key, "-o", "IdentitiesOnly=yes"] if target.key else []
    argv += ["-o", f"UserKnownHostsFile={target.known_hosts}"] if target.known_hosts else []
    argv += ["-p", str(target.port)] if target.port else []
    argv += ["-o", f"ProxyCommand={target.proxy}"] if target.proxy else []
    return shlex.join([*argv, str(target), "true"])


def _match(said: str) -> tuple[Cause, re.Match[str] | None]:
    text = said.replace("\r", "")
    for cause in _CAUSES:
        found = re.search(cause.pattern, text, re.MULTILINE)
        if found:
            return cause, found
    return _NEVER, None


def _sentences(said: str) -> list[str]:
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in said.splitlines()]
    return [line for line in lines if line and not line.startswith("@")]
