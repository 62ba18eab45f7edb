"""Images that a test cloud makes of its machines, with their snapshots."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from tests.support.cloud.machines import ImageHooks, Machines
from tests.support.cloud.wire import Answer, Request, error, filters, listed, tag_specifications, xml

__all__ = ["Picture", "created", "deleted", "deregistered", "described"]


@dataclass
class Picture:
    """An image that was made of a machine; without its registration, only the snapshot is left of it."""

    id: str
    snapshot: str
    name: str
    region: str
    state: str = "available"
    registered: bool = True
    tags: dict[str, str] = field(default_factory=dict[str, str])


def created(request: Request, images: MutableMapping[str, Picture], machines: Machines) -> Answer:
    """CreateImage."""
    instance = machines.shown(request.params.get("InstanceId", ""))
    name, tags = request.params.get("Name", ""), tag_specifications(request.params)
    if instance is None:
        return error("ec2", "InvalidInstanceID.NotFound", "no such instance")
    if any(image.name == name and image.registered for image in images.values()):
        return error("ec2", "InvalidAMIName.Duplicate", f"{name} is in use by another image")
    missing = [kind for kind in ("image", "snapshot") if "skyward:owner" not in tags.get(kind, {})]
    if missing:
        return error("ec2", "UntaggedResource", f"CreateImage without the owner of {', '.join(missing)}")
    id = f"ami-{secrets.token_hex(8)}"
    images[id] = Picture(id, f"snap-{secrets.token_hex(8)}", name, request.region, tags=tags["image"])
    if isinstance(machines.hooks, ImageHooks):
        machines.hooks.image_made(instance, id)
    return xml("CreateImage", f"<imageId>{id}</imageId>")


def described(request: Request, images: MutableMapping[str, Picture]) -> Answer | None:
    """DescribeImages of one's own images; None if others are asked for."""
    ids, requested = listed(request.params, "ImageId"), filters(request.params)
    if "self" not in listed(request.params, "Owner") and not any(id in images for id in ids):
        return None
    found = [
        image
        for image in images.values()
        if image.registered and image.region == request.region and (not ids or image.id in ids)
        if image.name in requested.get("name", [image.name])
    ]
    return xml("DescribeImages", f"<imagesSet>{''.join(map(_item, found))}</imagesSet>")


def deregistered(request: Request, images: MutableMapping[str, Picture]) -> Answer:
    """DeregisterImage: the snapshot stays."""
    image = images.get(request.params.get("ImageId", ""))
    if image is None or not image.registered:
        return error("ec2", "InvalidAMIID.NotFound", "no such image")
    image.registered = False
    return xml("DeregisterImage", "<return>true</return>")


def deleted(request: Request, images: MutableMapping[str, Picture]) -> Answer:
    """DeleteSnapshot: not while an image uses it."""
    image = next((i for i in images.values() if i.snapshot == request.params.get("SnapshotId")), None)
    if image is None:
        return error("ec2", "InvalidSnapshot.NotFound", "no such snapshot")
    if image.registered:
        return error("ec2", "InvalidSnapshot.InUse", f"it is in use by {image.id}")
    del images[image.id]
    return xml("DeleteSnapshot", "<return>true</return>")


def _item(image: Picture) -> str:
    tags = "".join(
        f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>" for key, value in image.tags.items()
    )
    return (
        f"<item><imageId>{image.id}</imageId><name>{escape(image.name)}</name><imageState>{image.state}</imageState>"
        "<architecture>x86_64</architecture><rootDeviceName>/dev/sda1</rootDeviceName><blockDeviceMapping><item>"
        f"<deviceName>/dev/sda1</deviceName><ebs><snapshotId>{image.snapshot}</snapshotId><volumeSize>50</volumeSize>"
        f"</ebs></item></blockDeviceMapping><tagSet>{tags}</tagSet></item>"
    )
