"""Keys of one pool, made for it and removed with it: one to log in with, one by which machines are known at first."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skyward.api.shell import Shell, SshTarget
from skyward.errors import CloudRefused
from skyward.machines.ledger import Ledger
from skyward.providers.aws.api import Api
from skyward.providers.aws.tags import Terms, filters, resource_name, specification

__all__ = ["PoolKeys", "ensure_key", "forget", "make_keys", "pin", "replace_host_key", "trust"]

_CHANGING = threading.Lock()  # machines are set up at the same time, and share a known_hosts
_HOST = "host_ed25519"
_SUDO = "Name a user of the image who may use sudo without a password: sky.AWS(username=...)."
_AS_ROOT = """\
set -e
umask 077
key=/etc/ssh/ssh_host_ed25519_key
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
"""
_MAKE_HOST_KEY = f"""{_AS_ROOT}
root rm -f $key.new $key.new.pub
root ssh-keygen -q -t ed25519 -N '' -C '' -f $key.new
root cat $key.new.pub
"""
# A reloaded sshd reads its keys again, soon after; connections that are open stay.
_TAKE_HOST_KEY = f"""{_AS_ROOT}
root mv -f $key.new.pub $key.pub
root mv -f $key.new $key
root systemctl reload ssh 2>/dev/null || root systemctl reload sshd 2>/dev/null || \\
  root sh -c 'kill -HUP "$(cat /run/sshd.pid)"'
for _ in $(seq 100); do
  ssh-keyscan -t ed25519 -p "$2" 127.0.0.1 2>/dev/null | grep -qF "$1" && exit 0
  sleep 0.1
done
echo "it still shows the old one" >&2
exit 1
"""


@dataclass(frozen=True)
class PoolKeys:
    """Files of a pool's keys; private ones are readable by this user only."""

    login: Path
    known_hosts: Path
    login_public: str
    host_private: str
    host_public: str


def make_keys(directory: Path) -> PoolKeys:
    """The keys in a pool's directory, made if they are not there."""
    login, host = directory / "id_ed25519", directory / _HOST
    for path in (login, host):
        if not path.exists():
            _generate(path)
    known = directory / "known_hosts"
    if not known.exists():
        _write(known, "")
    return PoolKeys(login, known, _public(login), host.read_text(), _public(host))


def trust(keys: PoolKeys, addresses: Iterable[str]) -> None:
    """Has ssh expect the pool's throw-away host key at these addresses, unless it knows another one there already."""
    with _CHANGING:
        known = keys.known_hosts.read_text().splitlines()
        named = {line.split(" ", 1)[0] for line in known}
        fresh = [f"{address} {keys.host_public}" for address in addresses if address not in named]
        if fresh:
            _replace(keys.known_hosts, "".join(f"{line}\n" for line in [*known, *fresh]))


def pin(known_hosts: Path, address: str, *host_keys: str) -> None:
    """Has ssh expect these host keys at an address and no others, such as the one that replaced the throw-away key."""
    with _CHANGING:
        known = known_hosts.read_text().splitlines()
        kept = [line for line in known if line.split(" ", 1)[0] != address]
        fresh = [f"{address} {key.strip()}" for key in host_keys]
        _replace(known_hosts, "".join(f"{line}\n" for line in [*kept, *fresh]))


def replace_host_key(shell: Shell, target: SshTarget, timeout: float = 120.0) -> str | None:
    """Has a machine make a host key of its own, over its first connection; says why where that cannot be.

    The one that came with the user data can be read there by whoever asks the metadata service. A machine that is still
    busy with its boot may take `timeout` seconds for each of two commands; it is set up meanwhile.
    """
    try:
        return _replaced(shell, target, timeout)
    except subprocess.TimeoutExpired:
        return _kept(f"it did not do so within {timeout:.0f} s", "", "Open the pool again if that matters to you.")


def _replaced(shell: Shell, target: SshTarget, timeout: float) -> str | None:
    assert target.known_hosts is not None
    known = Path(target.known_hosts)
    given = _public(known.with_name(_HOST))
    before = [line.split(" ", 1)[1] for line in known.read_text().splitlines() if line.split(" ", 1)[0] == target.host]
    if given not in before:
        return None  # it has been, by an earlier connection
    made = shell.run(["sh", "-c", _MAKE_HOST_KEY], timeout=timeout)
    fresh = made.out.decode("ascii", "replace").strip()
    if made.code != 0 or not fresh.startswith("ssh-ed25519 "):
        return _kept("making another there failed", made.err)
    pin(known, target.host, *before, fresh)  # whatever happens next, one of them is right
    done = shell.run(["sh", "-c", _TAKE_HOST_KEY, "sh", fresh, str(target.port or 22)], timeout=timeout)
    if done.code != 0:
        return _kept("its sshd could not be told to take another", done.err)
    pin(known, target.host, fresh)
    return None


def forget(keys: PoolKeys, addresses: Iterable[str]) -> None:
    """Has ssh forget machines that are gone: their addresses may come back as others."""
    gone = set(addresses)
    with _CHANGING:
        known = keys.known_hosts.read_text().splitlines()
        kept = [line for line in known if line.split(" ", 1)[0] not in gone]
        if len(kept) != len(known):
            _replace(keys.known_hosts, "".join(f"{line}\n" for line in kept))


def ensure_key(api: Api, ledger: Ledger, terms: Terms, keys: PoolKeys) -> str:
    """The name under which AWS knows the pool's login key."""
    name = resource_name(terms.pool)
    if ledger.history.left("key-pair"):
        return name
    call = ledger.intent("key-pair", region=api.account.region, name=name)
    try:
        api.call(
            "ec2",
            "import_key_pair",
            KeyName=name,
            PublicKeyMaterial=keys.login_public.encode(),
            TagSpecifications=specification(["key-pair"], terms.tags),
        )
    except CloudRefused as exc:
        # A duplicate is our own, of which the first answer was lost, if it is our key; its tags prove nothing.
        if exc.kind != "duplicate" or not _is_ours(api, terms, keys.login_public):
            if not exc.unanswered:
                ledger.refused(call, "key-pair", exc.code)
            raise
    ledger.answer(call, "key-pair", name, region=api.account.region)
    return name


def _is_ours(api: Api, terms: Terms, public: str) -> bool:
    requested = filters(pool=terms.pool, key_name=resource_name(terms.pool))
    found = api.pages("ec2", "describe_key_pairs", "KeyPairs", Filters=requested, IncludePublicKey=True)
    return any(str(key.get("PublicKey", "")).split()[:2] == public.split()[:2] for key in found)


def _kept(why: str, error: str, hint: str = _SUDO) -> str:
    last = error.strip().splitlines()[-1:]
    return (
        f"machines keep the host key of their user data, which whoever may read that can use to pass for them: {why}"
        f"{f' ({last[0]})' if last else ''}. {hint}"
    )


def _generate(path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    _write(
        path.with_name(f"{path.name}.pub"),
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
    )
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode())


def _public(path: Path) -> str:
    return path.with_name(f"{path.name}.pub").read_text().strip()


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    _write(part, text)
    os.replace(part, path)


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
