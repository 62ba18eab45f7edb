"""Which machine image a machine starts from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from skyward.api.provider import Machine
from skyward.errors import CloudRefused, InvalidArgument
from skyward.machines.offers import CloudOffer
from skyward.providers.aws.api import Api

__all__ = ["LOGIN", "MachineImage", "image_finder", "image_parameter", "known_user", "login_user", "without_image"]


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
