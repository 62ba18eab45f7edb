"""Warm starts: the disk of a machine whose environment is ready, kept as an image for later pools.

<state>/warm/<name>    one file per image, written before AWS is asked: only images named there are ours
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from skyward.api.provider import Leftover
from skyward.api.shell import Shell
from skyward.errors import CloudRefused, SkywardError
from skyward.machines.cloud import OWNER
from skyward.machines.ledger import state_dir, usable
from skyward.machines.offers import CloudOffer
from skyward.providers.aws.api import Api, filters, specification
from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.machines import CloudMachine
from skyward.providers.aws.prices import ROOM_GB

__all__ = ["UNUSED", "WARM", "Kept", "delete", "keep", "kept", "listed", "warm_finder"]

WARM = "skyward:warm"
UNUSED = 7 * 86400.0
_GB_MONTH = 0.05
"""Dollars per GB and month in us-east-1; only used blocks are charged."""
_LOST = 3600.0  # seconds after which an image that AWS does not show will not appear any more
_BOUND = 60.0
# What a machine has to keep while it runs and an image must not have goes to memory, and comes back by itself, too.
_CLEAN = """\
set -e
cache=$1 directory=$2 home=$3 user=$4 store=/run/skyward/warm
umask 077
mkdir -p "$store"
cd /
set -- "${directory#/}"
for file in etc/machine-id etc/ssh/ssh_host_* root/.ssh "${home#/}/.ssh"; do
    [ ! -e "$file" ] || set -- "$@" "$file"
done
tar -cpf "$store/kept.tar" "$@"
# An environment on a local disk, which no image has, is copied to the disk below it.
if mountpoint -q "$cache" 2>/dev/null; then
    mkdir -p "$store/root"
    mount --bind / "$store/root"
    for part in envs python bin; do [ ! -e "$cache/$part" ] || cp -a "$cache/$part" "$store/root$cache/"; done
    mkdir -p "$store/root$cache/pools"
    chown --reference="$cache" "$store/root$cache/pools"
    umount "$store/root"
fi
echo 'cd / && kept=run/skyward/warm/kept.tar && [ -e $kept ] && tar -xpf $kept && rm -f $kept' >"$store/back.sh"
setsid sh -c 'sleep 120; sh /run/skyward/warm/back.sh' </dev/null >/dev/null 2>&1 &
rm -rf etc/ssh/ssh_host_* root/.ssh "${home:?}/.ssh" "${cache:?}"/pools/*
rm -rf "$cache/stage" "$cache/logs" "$cache/uv" "$cache/wheels" "$home"/.*_history root/.*_history
[ ! -e etc/machine-id ] || : >etc/machine-id
rm -rf var/lib/cloud/instances var/lib/cloud/instance var/lib/cloud/sem var/lib/systemd/random-seed 2>/dev/null || :
rm -rf var/log/cloud-init*.log var/log/auth.log* var/log/syslog* var/log/journal/* 2>/dev/null || :
find tmp var/tmp -mindepth 1 -user "$user" -delete 2>/dev/null || :
sync
"""
_AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec "$@"; else exec sudo -n "$@"; fi'
_HOME = 'printf "%s\\n%s" "$HOME" "$(id -un)"'


@dataclass(frozen=True)
class Kept:
    name: str
    content: str
    base: str
    region: str
    owner: str
    profile: str | None = None
    endpoint_url: str | None = None
    made: float = 0.0
    used: float = 0.0
    image: str = ""


def content_of(key: str, base: str, architecture: str) -> str:
    return blake2b(json.dumps([key, base, architecture]).encode(), digest_size=12).hexdigest()


def warm_finder(
    api: Api, owner: str, key: str, base_of: Callable[[CloudOffer], MachineImage]
) -> Callable[[CloudOffer], MachineImage]:
    found: dict[str, MachineImage] = {}

    def image_of(offer: CloudOffer) -> MachineImage:
        base = base_of(offer)
        content = content_of(key, base.id, offer.architecture)
        if content not in found:
            ready = _ready(api, owner, content)
            found[content] = base if ready is None else replace(ready, user=base.user)
        return found[content]

    return image_of


def keep(api: Api, owner: str, key: str, machine: CloudMachine, shell: Shell, cache: str, directory: str) -> str | None:
    base = next((item.base for item in kept() if item.image == machine.image), machine.image)
    content = content_of(key, base, machine.architecture)
    name = f"skyward-warm-{content}-{secrets.token_hex(4)}"
    account, now = api.account, time.time()
    made = Kept(name, content, base, account.region, owner, account.profile, account.endpoint_url, now, now)
    try:
        home, _, user = shell.run(["sh", "-c", _HOME], timeout=20).out.decode().partition("\n")
        argv = ["sh", "-c", _AS_ROOT, "sh"]
        done = shell.run([*argv, "sh", "-c", _CLEAN, "sh", cache, directory, home, user], timeout=120)
        if done.code != 0:
            return (
                f"the environment is not kept as an image: its disk could not be cleaned ({done.err.strip()[-200:]})."
            )
        try:
            _write(made)  # before it is asked for
            _create(api, made, machine.id)
        finally:
            shell.run([*argv, "sh", "/run/skyward/warm/back.sh"], timeout=60)
    except (SkywardError, OSError, subprocess.TimeoutExpired) as exc:
        return f"the environment is not kept as an image: {exc}"
    for old in kept():  # what it replaces
        if old.name != name and old.content == content and (old.region, old.owner) == (made.region, owner):
            delete(api, old)
    return None


def kept() -> list[Kept]:
    found: list[Kept] = []
    for path in sorted(_directory().glob("skyward-warm-*")):
        try:
            item = Kept(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # not written by us, or not to its end
        if item.name == path.name and usable(item.name):
            found.append(item)
    return found


def listed(api: Api, item: Kept) -> Leftover | None:
    image = _described(api, item)
    if image is None:
        return None
    size = _gigabytes(image)
    days = max(0.0, time.time() - item.used) / 86400
    detail = (
        f"{image.get('State', '?')}, {size} GB, at most ${size * _GB_MONTH:.2f} a month, last used {days:.0f} days ago"
    )
    return Leftover("", str(image["ImageId"]), "warm image", detail)


def delete(api: Api, item: Kept) -> str:
    image = _described(api, item)
    if image is None:
        if time.time() - item.made > _LOST:
            (_directory() / item.name).unlink(missing_ok=True)
        return ""
    _gone(api, "ec2", "deregister_image", ImageId=image["ImageId"])
    for disk in _disks(image):
        if "SnapshotId" in disk:
            _gone(api, "ec2", "delete_snapshot", SnapshotId=disk["SnapshotId"])
    (_directory() / item.name).unlink(missing_ok=True)
    return str(image["ImageId"])


def _ready(api: Api, owner: str, content: str) -> MachineImage | None:
    for item in kept():
        if (item.content, item.region, item.owner) != (content, api.account.region, owner):
            continue
        image = _described(api, item)
        if image is not None and image.get("State") == "failed":
            delete(api, item)
        elif image is not None and image.get("State") == "available":
            _write(replace(item, used=time.time(), image=str(image["ImageId"])))
            # its disk has room already: what a usual image is given on top of its size is in it
            size = max(0, _gigabytes(image) - ROOM_GB)
            return MachineImage(str(image["ImageId"]), image.get("RootDeviceName") or "/dev/sda1", size)
    return None


def _described(api: Api, item: Kept) -> dict[str, Any] | None:
    """By name and owner: names cannot be changed, tags can."""
    found = api.pages("ec2", "describe_images", "Images", Owners=["self"], Filters=filters(name=item.name))
    ours = {"Key": OWNER, "Value": item.owner[:256]}
    return next(
        (image for image in found if image.get("Name") == item.name and ours in (image.get("Tags") or [])), None
    )


def _create(api: Api, made: Kept, instance: str) -> None:
    tags = {OWNER: made.owner[:256], WARM: made.content, "Name": made.name}
    try:
        api.call(
            "ec2",
            "create_image",
            InstanceId=instance,
            Name=made.name,
            NoReboot=True,
            TagSpecifications=specification(["image", "snapshot"], tags),
        )
    except CloudRefused as exc:
        if not exc.unanswered and exc.kind != "duplicate":  # a duplicate is ours: the first answer was lost
            (_directory() / made.name).unlink(missing_ok=True)
            raise
    began = time.monotonic()
    while time.monotonic() - began < _BOUND:  # until the disk's content is taken as it is now
        image = _described(api, made)
        if image is not None and any("SnapshotId" in disk for disk in _disks(image)):
            return
        time.sleep(api.account.pace.poll)


def _gone(api: Api, service: str, operation: str, **what: str) -> None:
    try:
        api.call(service, operation, True, **what)
    except CloudRefused as exc:
        if exc.kind != "missing" and not exc.code.startswith("InvalidAMIID"):
            raise


def _disks(image: dict[str, Any]) -> Iterator[dict[str, Any]]:
    mappings: list[dict[str, Any]] = image.get("BlockDeviceMappings") or []
    for mapping in mappings:
        yield mapping.get("Ebs") or {}


def _gigabytes(image: dict[str, Any]) -> int:
    return max((int(disk.get("VolumeSize", 0)) for disk in _disks(image)), default=0)


def _directory() -> Path:
    return state_dir() / "warm"


def _write(item: Kept) -> None:
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = directory / f".{item.name}.{os.getpid()}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        json.dump(asdict(item), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, directory / item.name)
