"""What a test cloud has on offer: images and prices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from skyward.testing.wire import Answer, Request, error, listed, reply, xml

__all__ = ["IMAGES", "images", "parameter", "products", "spot_prices"]

_GPU = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-{}/latest/ami-id"
_CPU = "/aws/service/canonical/ubuntu/server/{}/stable/current/{}/hvm/{}/ami-id"
IMAGES = {
    _CPU.format("24.04", "amd64", "ebs-gp3"): "ami-00000000000000001",
    _CPU.format("24.04", "arm64", "ebs-gp3"): "ami-00000000000000002",
    _CPU.format("22.04", "amd64", "ebs-gp2"): "ami-00000000000000003",
    _GPU.format("x86_64", "24.04"): "ami-00000000000000004",
    _GPU.format("arm64", "24.04"): "ami-00000000000000005",
    "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id": "ami-00000000000000006",
}
"""Public parameter -> the image that it names."""


def images(request: Request) -> Answer:
    """DescribeImages."""
    names = {id: name for name, id in IMAGES.items()}
    requested = listed(request.params, "ImageId")
    unknown = [id for id in requested if id not in names]
    if unknown:
        return error("ec2", "InvalidAMIID.NotFound", f"no image {', '.join(unknown)}")
    items = [
        f"<item><imageId>{id}</imageId><imageState>available</imageState>"
        f"<architecture>{'arm64' if 'arm64' in names[id] else 'x86_64'}</architecture>"
        "<rootDeviceName>/dev/sda1</rootDeviceName><rootDeviceType>ebs</rootDeviceType><blockDeviceMapping><item>"
        "<deviceName>/dev/sda1</deviceName><ebs><volumeSize>8</volumeSize></ebs></item></blockDeviceMapping></item>"
        for id in requested or names
    ]
    return xml("DescribeImages", f"<imagesSet>{''.join(items)}</imagesSet>")


def parameter(request: Request) -> Answer:
    """GetParameter."""
    name = request.params.get("Name", "")
    if name not in IMAGES:
        return error("ssm", "ParameterNotFound", f"no parameter {name}")
    return reply({"Parameter": {"Name": name, "Type": "String", "Value": IMAGES[name], "Version": 1}})


def products(request: Request, demand: Callable[[str, str], Mapping[str, float]]) -> Answer:
    """GetProducts: on-demand prices of one type, or of all."""
    requested: dict[str, str] = {f["Field"]: f["Value"] for f in json.loads(request.params.get("Filters", "[]"))}
    region = requested.get("regionCode", "")
    found: list[str] = []
    for kind, price in demand(requested.get("instanceType", ""), region).items():
        terms = {"t": {"priceDimensions": {"d": {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}}}}}
        product = {"attributes": {"instanceType": kind, "regionCode": region}}
        found.append(json.dumps({"product": product, "terms": {"OnDemand": terms}}))
    return reply({"FormatVersion": "aws_v1", "PriceList": found})


def spot_prices(request: Request, spot: Callable[[str, str], float | None]) -> Answer:
    """DescribeSpotPriceHistory."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    items = [
        f"<item><instanceType>{kind}</instanceType><availabilityZone>{zone}</availabilityZone>"
        f"<productDescription>Linux/UNIX</productDescription><spotPrice>{price:.6f}</spotPrice>"
        f"<timestamp>{now}</timestamp></item>"
        for kind in listed(request.params, "InstanceType")
        for zone in (f"{request.region}{letter}" for letter in "abcdef")
        if (price := spot(kind, zone)) is not None
    ]
    return xml("DescribeSpotPriceHistory", f"<spotPriceHistorySet>{''.join(items)}</spotPriceHistorySet>")
