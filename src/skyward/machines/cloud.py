"""What any cloud needs: keys, user data by which a machine ends itself, tags, proof of ownership, a receipt.

before anything exists       make_keys, user_data, Terms.tags
a machine has an address     trust, ssh_target; then replace_host_key over its first connection
listing and giving back      Claim.owns; CloudReceipt of Bills
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from string import Template
from typing import Any, cast

from skyward.api.provider import Receipt
from skyward.api.shell import Shell, SshTarget
from skyward.errors import InvalidArgument
from skyward.machines.ledger import History, Ledger, pool_dir, shown, usable
from skyward.machines.offers import Market, Price, money
from skyward.machines.spent import Charge

__all__ = [
    "EXPIRES",
    "LEASE_FILE",
    "OWNER",
    "PARTS",
    "POOL",
    "Bill",
    "Claim",
    "CloudReceipt",
    "End",
    "PoolKeys",
    "Terms",
    "ends",
    "expiry",
    "forget",
    "lease_script",
    "make_keys",
    "note_end",
    "pin",
    "price_of",
    "price_tags",
    "remark",
    "replace_host_key",
    "resource_name",
    "ssh_target",
    "trust",
    "user_data",
]


# Keys of one pool, made for it and removed with its directory: one to log in with, one by which machines are known at
# first.

_CHANGING = threading.Lock()  # machines are set up at the same time, and share a known_hosts
_HOST = "host_ed25519"
_SUDO = "Name a user of the image who may use sudo without a password."
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
    login: Path
    known_hosts: Path
    login_public: str
    host_private: str
    host_public: str


def make_keys(directory: Path) -> PoolKeys:
    login, host = directory / "id_ed25519", directory / _HOST
    for path in (login, host):
        if not path.exists():
            _generate(path)
    known = directory / "known_hosts"
    if not known.exists():
        _write(known, "")
    return PoolKeys(login, known, _public(login), host.read_text(), _public(host))


def trust(keys: PoolKeys, addresses: Iterable[str]) -> None:
    """Has ssh expect the pool's throw-away host key at these addresses, unless it knows another one."""
    with _CHANGING:
        known = keys.known_hosts.read_text().splitlines()
        named = {line.split(" ", 1)[0] for line in known}
        fresh = [f"{address} {keys.host_public}" for address in addresses if address not in named]
        if fresh:
            _replace(keys.known_hosts, "".join(f"{line}\n" for line in [*known, *fresh]))


def pin(known_hosts: Path, address: str, *host_keys: str) -> None:
    """Has ssh expect only these host keys at an address."""
    with _CHANGING:
        known = known_hosts.read_text().splitlines()
        kept = [line for line in known if line.split(" ", 1)[0] != address]
        fresh = [f"{address} {key.strip()}" for key in host_keys]
        _replace(known_hosts, "".join(f"{line}\n" for line in [*kept, *fresh]))


def replace_host_key(shell: Shell, target: SshTarget, timeout: float = 120.0, hint: str = _SUDO) -> str | None:
    """Has a machine make its own host key over its first connection; returns why if that fails.

    The key in the user data can be read on the machine. Each of two commands may take `timeout` seconds; `hint` is what
    the user can do where root is needed. Fits `Access.settle`.
    """
    try:
        return _replaced(shell, target, timeout, hint)
    except subprocess.TimeoutExpired:
        return _kept(f"it did not do so within {timeout:.0f} s", "", "Open the pool again if that matters to you.")


def _replaced(shell: Shell, target: SshTarget, timeout: float, hint: str) -> str | None:
    assert target.known_hosts is not None
    known = Path(target.known_hosts)
    given = _public(known.with_name(_HOST))
    before = [line.split(" ", 1)[1] for line in known.read_text().splitlines() if line.split(" ", 1)[0] == target.host]
    if given not in before:
        return None  # it has been, by an earlier connection
    made = shell.run(["sh", "-c", _MAKE_HOST_KEY], timeout=timeout)
    fresh = made.out.decode("ascii", "replace").strip()
    if made.code != 0 or not fresh.startswith("ssh-ed25519 "):
        return _kept("making another there failed", made.err, hint)
    pin(known, target.host, *before, fresh)  # whatever happens next, one of them is right
    done = shell.run(["sh", "-c", _TAKE_HOST_KEY, "sh", fresh, str(target.port or 22)], timeout=timeout)
    if done.code != 0:
        return _kept("its sshd could not be switched to another", done.err, hint)
    pin(known, target.host, fresh)
    return None


def forget(keys: PoolKeys, addresses: Iterable[str]) -> None:
    """Removes host keys of machines that are gone: addresses are reused."""
    gone = set(addresses)
    with _CHANGING:
        known = keys.known_hosts.read_text().splitlines()
        kept = [line for line in known if line.split(" ", 1)[0] not in gone]
        if len(kept) != len(known):
            _replace(keys.known_hosts, "".join(f"{line}\n" for line in kept))


def ssh_target(address: str, user: str, pool: str) -> SshTarget | None:
    try:
        directory = pool_dir(pool)
    except InvalidArgument:
        return None  # nothing that we have named
    if not directory.exists():
        return None  # a pool of another computer: its keys are there
    key, known = str(directory / "id_ed25519"), str(directory / "known_hosts")
    return SshTarget(host=address, user=user, key=key, known_hosts=known, config=False)


def _kept(why: str, error: str, hint: str) -> str:
    last = error.strip().splitlines()[-1:]
    return (
        f"machines keep the host key of their user data, and anybody who can read that can impersonate them: {why}"
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


# What a machine does by itself: it ends when nobody renews its lease.

LEASE_FILE = "/run/skyward/lease"

# Counts the machine's own seconds, so that a clock set right after boot ends nothing; sh and nothing else.
_SCRIPT = Template("""\
#!/bin/sh
# Ends this machine when nobody has renewed its lease for $lease s, or when it is $life s old.
# Renew it with: touch $file; end it at once with: echo end > $file
file=$file lease=$lease life=$life
dir=$${file%/*}
now() { cut -d. -f1 /proc/uptime; }
mkdir -p "$$dir" && chmod 755 "$$dir"
[ -e "$$file" ] || (umask 0 && : > "$$file")
[ -s "$$dir/started" ] || now > "$$dir/started"
started=$$(cat "$$dir/started")
seen=$$(now)
last=
while :; do
  stamp=$$(stat -c %y "$$file" 2>/dev/null)
  time=$$(now)
  if [ "$$stamp" != "$$last" ]; then last=$$stamp; seen=$$time; fi
  over=; grep -qx end "$$file" 2>/dev/null && over=1
  if [ "$$over" ] || [ $$((time - seen)) -ge "$$lease" ] || [ $$((time - started)) -ge "$$life" ]; then
    shutdown -P now || systemctl poweroff || poweroff
  fi
  sleep $step
done
""")

# First of all things at boot: a unit of its own that systemd restarts, and a timer that needs no loop; where there is
# no systemd, a process of its own session. Neither unit has default dependencies: those wait for sysinit.target,
# which waits for cloud-init, which waits for this; the machine would never finish its boot.
_ARM = Template("""\
mkdir -p /run/skyward && cat > /run/skyward/lease.sh <<'END_OF_LEASE'
$script
END_OF_LEASE
if command -v systemd-run >/dev/null 2>&1 && [ -d /run/systemd/system ]; then
  systemd-run --no-block --unit=skyward-lease -p DefaultDependencies=no -p Restart=always -p OOMScoreAdjust=-1000 \\
    /bin/sh /run/skyward/lease.sh
  systemd-run --no-block --unit=skyward-life --on-active=$life --timer-property=DefaultDependencies=no \\
    /bin/sh -c 'shutdown -P now || systemctl poweroff'
else
  setsid sh /run/skyward/lease.sh </dev/null >/dev/null 2>&1 &
fi
""")


def lease_script(lease: float, life: float) -> str:
    """The program that ends the machine; independent of Python, SSH and us."""
    step = max(1, min(10, int(lease // 4)))
    return _SCRIPT.substitute(lease=ceil(lease), life=ceil(life), file=LEASE_FILE, step=step)


def user_data(host_private: str, host_public: str, lease: float, life: float, most: int = 16 * 1024) -> str:
    """Cloud-init's settings, as JSON; no secret but a throw-away host key. The machine ends itself when nobody has
    touched `LEASE_FILE` for `lease` seconds, and after `life` seconds; `most` is how many bytes the cloud takes.
    """
    arm = _ARM.substitute(script=lease_script(lease, life), life=ceil(life))
    settings = {
        "bootcmd": [["sh", "-c", arm]],
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": host_private, "ed25519_public": host_public},
        "ssh_pwauth": False,
        "package_update": False,
        "package_upgrade": False,
    }
    text = "#cloud-config\n" + json.dumps(settings, indent=1) + "\n"
    if len(text.encode()) > most:
        raise InvalidArgument(f"the user data has {len(text.encode())} bytes; the cloud takes {most}.")
    return text


# What everything of a pool is called and says, and by what it is known to be the pool's.

POOL, OWNER = "skyward:pool", "skyward:owner"
EXPIRES, VERSION = "skyward:expires-at", "skyward:version"
PRICE, PARTS = "skyward:hourly-cost", "skyward:hourly-parts"


@dataclass(frozen=True)
class Terms:
    pool: str
    owner: str
    expires: float
    version: str
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def tags(self) -> dict[str, str]:
        """Ours win over the user's."""
        until = datetime.fromtimestamp(self.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ours = {POOL: self.pool, OWNER: self.owner[:256], EXPIRES: until, VERSION: self.version}
        return {**dict(self.extra), "Name": f"skyward {self.pool}", **ours}


def resource_name(pool: str) -> str:
    return f"skyward-{pool}"


def price_tags(price: Price) -> dict[str, str]:
    parts = " ".join(f"{name}={value:.6g}" for name, value in price.record().items())
    return {PRICE: f"{price.total:.6g}", PARTS: parts}


def price_of(tags: Mapping[str, str]) -> Price:
    """The hourly cost in tags, which anybody may have written."""
    try:
        parts = dict(part.split("=", 1) for part in tags.get(PARTS, "").split())
        return Price.read(parts or {"machine": tags.get(PRICE, 0)})
    except ValueError:
        return Price()


def expiry(tags: Mapping[str, str]) -> float | None:
    try:
        return datetime.strptime(tags.get(EXPIRES, ""), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True)
class Claim:
    """What tells a pool's own things from those that only carry its tags: an id in our ledger, the token of the call
    that made something, or its name. Tags prove nothing.
    """

    pool: str
    owner: str
    history: History

    def owns(self, kind: str, id: str, tags: Mapping[str, str], name: str = "", token: str = "") -> bool:
        """`name` is the thing's own or that of its key, `token` its call's."""
        listed = id in self.history.made(kind)
        launched = token != "" and token in self._tokens(kind)
        named = name == resource_name(self.pool)
        # by its making alone, for something whose tags somebody has removed
        return (listed and launched) or (self.tagged(tags) and (listed or launched or named))

    def tagged(self, tags: Mapping[str, str]) -> bool:
        return usable(self.pool) and tags.get(POOL) == self.pool and tags.get(OWNER) == self.owner[:256]

    def _tokens(self, kind: str) -> set[str]:
        asked = (record for record in self.history.records if record.fact == "intent" and record.kind == kind)
        return {str(record.data.get("token", "")) for record in asked} - {""}


def remark(pool: str, names: Sequence[str], command: str) -> str:
    them, carry = ("it", "carries") if len(names) == 1 else ("them", "carry")
    return (
        f"{', '.join(map(shown, names))} {carry} the tag of pool {shown(pool)}, but nothing proves that "
        f"Skyward made {them} for you: not ours, left alone. Find out who wrote the tag. To remove it: {command}"
    )


# What machines came to.


@dataclass(frozen=True)
class End:
    time: float
    taken_back: bool = False


def note_end(ledger: Ledger, id: str, time: float, taken_back: bool = False) -> None:
    """Records the end of a machine of an open pool: clouds do not list it for ever."""
    ledger.note(ended=id, at=time, taken_back=taken_back)


def ends(history: History) -> dict[str, End]:
    found: dict[str, End] = {}
    for record in history.records:
        data: dict[str, Any] = dict(record.data) if record.fact == "note" else {}
        id, when = data.get("ended"), data.get("at")
        if isinstance(id, str) and isinstance(when, int | float):
            found.setdefault(id, End(float(cast(float, when)), data.get("taken_back") is True))
    return found


@dataclass(frozen=True)
class Bill:
    id: str
    kind: str
    zone: str
    market: Market
    seconds: float
    hourly: Price = field(default_factory=Price)
    taken_back: bool = False
    began: float = 0.0

    @property
    def hourly_cost(self) -> float:
        return self.hourly.known_total

    @property
    def charged(self) -> Price:
        return self.hourly.times(self.seconds / 3600)

    @property
    def cost(self) -> float:
        return self.charged.known_total

    @property
    def where(self) -> str:
        return f"{self.market}, {self.zone}{', taken back' if self.taken_back else ''}"

    @property
    def price(self) -> str:
        return f"{money(self.cost)}{'' if self.charged.known else ' and the machine, whose price is not known'}"

    def __str__(self) -> str:
        return f"{self.id}  {self.kind} ({self.where})  {self.seconds:,.0f} s  {self.price}"


@dataclass(frozen=True)
class CloudReceipt(Receipt):
    region: str
    machines: tuple[Bill, ...] = ()
    created: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    provider: str = ""

    def charges(self) -> list[Charge]:
        return [
            Charge(
                pool=self.pool,
                provider=self.provider,
                began=bill.began,
                ended=bill.began + bill.seconds,
                dollars=bill.cost,
                machine=bill.id,
                market=bill.market,
                unknown=not bill.charged.known,
            )
            for bill in self.machines
            if bill.began
        ]

    def _repr_html_(self) -> str:
        from skyward.api.html import table

        columns = ["machine", "kind", "where", "seconds", "cost"]
        rows = [(bill.id, bill.kind, bill.where, f"{bill.seconds:,.0f}", bill.price) for bill in self.machines]
        return table(self._head, columns, rows, [self._total, *self.remarks])

    @property
    def costs(self) -> Price:
        known = [bill.charged for bill in self.machines]
        return Price(
            sum(costs.machine for costs in known if costs.known),
            sum(costs.disk for costs in known),
            sum(costs.address for costs in known),
        )

    @property
    def total(self) -> float:
        return self.costs.total

    def __str__(self) -> str:
        return "\n".join([self._head, *(f"  {line}" for line in (*self.machines, self._total, *self.remarks))])

    @property
    def _head(self) -> str:
        things = f"{len(self.created)} thing{'' if len(self.created) == 1 else 's'}"
        return f"pool {self.pool} in {self.region}: {things} created, {len(self.gone)} confirmed gone"

    @property
    def _total(self) -> str:
        unknown = sum(not bill.charged.known for bill in self.machines)
        least = f" and {unknown} {'machine' if unknown == 1 else 'machines'} of unknown price" if unknown else ""
        parts = f" ({self.costs}; traffic is not counted)" if self.machines else ""
        return f"total {money(self.total)}{least}{parts}"
