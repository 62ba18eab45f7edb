"""Which machine image a machine starts from.

A warm one is the disk of a machine whose environment is ready, kept for later pools:

<state>/warm/<name>    one file per image, written before AWS is asked: only images named there are ours
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from skyward.api.provider import Leftover, Machine
from skyward.api.shell import Shell
from skyward.errors import CloudRefused, InvalidArgument, SkywardError
from skyward.machines.cloud import OWNER
from skyward.machines.ledger import state_dir, usable
from skyward.machines.offers import CloudOffer
from skyward.providers.aws.api import Api, filters, specification
from skyward.providers.aws.machines import CloudMachine
from skyward.providers.aws.prices import ROOM_GB

__all__ = [
    "LOGIN",
    "UNUSED",
    "WARM",
    "Kept",
    "MachineImage",
    "delete",
    "image_finder",
    "image_parameter",
    "keep",
    "kept",
    "known_user",
    "listed",
    "login_user",
    "warm_finder",
    "without_image",
]


USUAL = "ubuntu"
LOGIN = (
    "Each image has a user of its own: ubuntu on Ubuntu, admin on Debian, ec2-user on Amazon Linux and Red Hat. "
    "Name that of your image: sky.AWS(username=...)."
)

# The first word that a text has counts. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/managing-users.html
_WORDS = {
    r"ubuntu": "ubuntu",
    r"debian": "admin",
    r"amazon.?linux|amzn|al20\d\d": "ec2-user",
    r"rhel|red.?hat": "ec2-user",
    r"(?:open)?suse|sles": "ec2-user",
    r"oracle.?linux": "ec2-user",
    r"rocky": "rocky",
    r"alma.?linux": "ec2-user",
    r"centos.?stream.?(?:9|1\d)": "ec2-user",
    r"centos": "centos",
    r"fedora": "fedora",
}
_ANY = "|".join(f"(?P<w{number}>{word})" for number, word in enumerate(_WORDS))
_FIRST = re.compile(f"(?<![a-z0-9])(?:{_ANY})", re.IGNORECASE)
# Accounts of distributions; CentOS and Fedora share one, which says nothing.
_OWNERS = {
    "099720109477": "ubuntu",  # Canonical
    "136693071363": "admin",  # Debian
    "137112412989": "ec2-user",  # Amazon Linux
    "309956199498": "ec2-user",  # Red Hat
    "013907871322": "ec2-user",  # SUSE
    "764336703387": "ec2-user",  # AlmaLinux
    "792107900819": "rocky",  # Rocky Linux
}


def login_user(image: Mapping[str, Any]) -> str | None:
    return (
        _named_user(image.get("Name"))
        or _OWNERS.get(str(image.get("OwnerId")))
        or _named_user(image.get("PlatformDetails"))
        or _named_user(image.get("Description"))
    )


def _named_user(text: object) -> str | None:
    found = _FIRST.search(str(text or ""))
    return None if found is None else list(_WORDS.values())[int(str(found.lastgroup)[1:])]


# The open kernel driver of the base image begins with Turing.
_BEFORE_TURING = ("V100", "P100", "P40", "P4", "M60", "K80")
_NEURON = ("Trainium", "Inferentia")
_OTHERS = ("Gaudi", "Radeon")
# The driver in Neuron images from 2.26.1 on knows it no longer: https://awsdocs-neuron.readthedocs-hosted.com
_INF1 = "Inferentia"
_ORIGINS = 4  # so many images back it is asked what an image was made from


@dataclass(frozen=True)
class MachineImage:
    id: str
    root_device: str
    root_gb: int
    user: str = USUAL


def image_parameter(accelerator: str, architecture: str, ubuntu: str) -> str | None:
    if not accelerator:
        arch = "arm64" if architecture == "arm64" else "amd64"
        disk = "ebs-gp2" if ubuntu <= "22.04" else "ebs-gp3"
        return f"/aws/service/canonical/ubuntu/server/{ubuntu}/stable/current/{arch}/hvm/{disk}/ami-id"
    if accelerator in (*_BEFORE_TURING, _INF1) or accelerator.startswith(_OTHERS):
        return None
    if accelerator.startswith(_NEURON):
        return f"/aws/service/neuron/dlami/base/ubuntu-{ubuntu}/latest/image_id"
    name = f"base-oss-nvidia-driver-gpu-ubuntu-{ubuntu}"
    return f"/aws/service/deeplearning/ami/{architecture}/{name}/latest/ami-id"


def without_image(accelerator: str) -> str:
    if accelerator == _INF1:
        return (
            'AWS\'s Neuron images no longer have a driver for the first Inferentia; ask for accelerator="Inferentia2" '
            "(inf2), or give an older image with ami=..."
        )
    return f"AWS has no image with drivers for {accelerator}; give one with ami=..."


def find_image(api: Api, name: str, architecture: str | None = None) -> MachineImage:
    id = name if name.startswith("ami-") else _named(api, name)
    image = _described(api, id)
    if image is None:
        raise InvalidArgument(
            f"there is no image {id} in {api.account.region} that this account may use; images belong to one region. "
            "Nothing was created. Give the id for this region, or leave `ami` out."
        )
    if architecture is not None and image.get("Architecture", architecture) != architecture:
        raise InvalidArgument(
            f"image {id} is for {image['Architecture']}, the machines are {architecture}. Nothing was created. "
            f'Give another `ami`, or say architecture="{image["Architecture"]}".'
        )
    root = image.get("RootDeviceName") or "/dev/sda1"
    mappings: list[dict[str, Any]] = image.get("BlockDeviceMappings") or []
    sizes = [m["Ebs"].get("VolumeSize", 0) for m in mappings if m.get("DeviceName") == root and m.get("Ebs")]
    # what a parameter names is Ubuntu
    user = _user(api, image) if name == id else USUAL
    return MachineImage(id, root, int(sizes[0]) if sizes else 0, user)


def image_finder(api: Api, ami: str | None, ubuntu: str) -> Callable[[CloudOffer], MachineImage]:
    found = cache(partial(find_image, api))

    def image_of(offer: CloudOffer) -> MachineImage:
        name = ami or image_parameter(offer.accelerator, offer.architecture, ubuntu)
        return found(name or "", offer.architecture)

    return image_of


def known_user(api: Api, username: str | None, ami: str | None, machines: Sequence[Machine]) -> str:
    known = [username, *(machine.ssh.user for machine in machines if machine.ssh is not None)]
    named = next((user for user in known if user), None)
    return named or (USUAL if ami is None else find_image(api, ami).user)


def _described(api: Api, id: str) -> dict[str, Any] | None:
    try:
        found: list[dict[str, Any]] = api.call("ec2", "describe_images", ImageIds=[id]).get("Images") or []
    except CloudRefused as exc:
        if exc.kind != "missing" and not exc.code.startswith("InvalidAMIID"):
            raise
        found = []
    return found[0] if found else None


def _user(api: Api, image: dict[str, Any]) -> str:
    origin: dict[str, Any] | None = image
    for _ in range(_ORIGINS):
        user = login_user(origin)
        if user is not None:
            return user
        source = origin.get("SourceImageId")
        if not source or origin.get("SourceImageRegion", api.account.region) != api.account.region:
            break
        origin = _described(api, str(source))  # it may be gone, or not for this account
        if origin is None:
            break
    return USUAL


def _named(api: Api, name: str) -> str:
    try:
        return str(api.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"])
    except CloudRefused as exc:
        if exc.kind != "missing":
            raise
        raise InvalidArgument(
            f"AWS has no image under {name} in {api.account.region}. Nothing was created. "
            "Choose another ubuntu_version, or give an image: sky.AWS(ami=...)."
        ) from exc


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
    image = _shown(api, item)
    if image is None:
        return None
    size = _gigabytes(image)
    days = max(0.0, time.time() - item.used) / 86400
    detail = (
        f"{image.get('State', '?')}, {size} GB, at most ${size * _GB_MONTH:.2f} a month, last used {days:.0f} days ago"
    )
    return Leftover("", str(image["ImageId"]), "warm image", detail)


def delete(api: Api, item: Kept) -> str:
    image = _shown(api, item)
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
        image = _shown(api, item)
        if image is not None and image.get("State") == "failed":
            delete(api, item)
        elif image is not None and image.get("State") == "available":
            _write(replace(item, used=time.time(), image=str(image["ImageId"])))
            # its disk has room already: what a usual image is given on top of its size is in it
            size = max(0, _gigabytes(image) - ROOM_GB)
            return MachineImage(str(image["ImageId"]), image.get("RootDeviceName") or "/dev/sda1", size)
    return None


def _shown(api: Api, item: Kept) -> dict[str, Any] | None:
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
        image = _shown(api, made)
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
