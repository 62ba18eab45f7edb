"""Which machine image a machine starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from skyward.errors import CloudRefused, InvalidArgument
from skyward.machines.offers import CloudOffer
from skyward.providers.aws.api import Api

__all__ = ["MachineImage", "find_image", "image_finder", "image_parameter", "without_image"]

# The open kernel driver of the base image begins with Turing.
_BEFORE_TURING = ("V100", "P100", "P40", "P4", "M60", "K80")
_NEURON = ("Trainium", "Inferentia")
_OTHERS = ("Gaudi", "Radeon")
# The driver in Neuron images from 2.26.1 on knows it no longer: https://awsdocs-neuron.readthedocs-hosted.com
_INF1 = "Inferentia"


@dataclass(frozen=True)
class MachineImage:
    """An image: its id and what its root disk is called and needs."""

    id: str
    root_device: str
    root_gb: int


def image_parameter(accelerator: str, architecture: str, ubuntu: str) -> str | None:
    """The public parameter that names the newest image for a machine; None where AWS has no image that fits."""
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
    """Why AWS has no image for machines with this accelerator, and what to do."""
    if accelerator == _INF1:
        return (
            'AWS\'s Neuron images have no driver for the first Inferentia any more; ask for accelerator="Inferentia2" '
            "(inf2), or give an older image with ami=..."
        )
    return f"AWS has no image with drivers for {accelerator}; give one with ami=..."


def find_image(api: Api, name: str, architecture: str) -> MachineImage:
    """The image with this id, or the one that a parameter names."""
    id = name if name.startswith("ami-") else _named(api, name)
    try:
        found: list[dict[str, Any]] = api.call("ec2", "describe_images", ImageIds=[id]).get("Images") or []
    except CloudRefused as exc:
        if exc.kind != "missing" and not exc.code.startswith("InvalidAMIID"):
            raise
        found = []
    if not found:
        raise InvalidArgument(
            f"there is no image {id} in {api.account.region} that this account may use; images belong to one region. "
            "Nothing was created. Give the id for this region, or leave `ami` out."
        )
    image = found[0]
    if image.get("Architecture", architecture) != architecture:
        raise InvalidArgument(
            f"image {id} is for {image['Architecture']}, the machines are {architecture}. Nothing was created. "
            f'Give another `ami`, or say architecture="{image["Architecture"]}".'
        )
    root = image.get("RootDeviceName") or "/dev/sda1"
    mappings: list[dict[str, Any]] = image.get("BlockDeviceMappings") or []
    sizes = [m["Ebs"].get("VolumeSize", 0) for m in mappings if m.get("DeviceName") == root and m.get("Ebs")]
    return MachineImage(id, root, int(sizes[0]) if sizes else 0)


def image_finder(api: Api, ami: str | None, ubuntu: str) -> Callable[[CloudOffer], MachineImage]:
    """Finds the image that machines of an offer start from; each image is asked for once."""
    found = cache(partial(find_image, api))

    def image_of(offer: CloudOffer) -> MachineImage:
        name = ami or image_parameter(offer.accelerator, offer.architecture, ubuntu)
        return found(name or "", offer.architecture)

    return image_of


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
