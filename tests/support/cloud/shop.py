"""What a test cloud has on offer: images and prices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from tests.support.cloud.wire import Answer, Request, error, listed, reply, xml

__all__ = ["GP3", "IMAGES", "IMAGE_GB", "OTHERS", "images", "parameter", "products", "quota", "spot_prices"]

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
IMAGE_GB = {"ami-00000000000000004": 65, "ami-00000000000000005": 65, "ami-00000000000000006": 50}
"""Image -> size of its disk in GB, where it is not 8: those with drivers are large."""
_DEBIAN = "<name>debian-12-amd64-20250814-2204</name><imageOwnerId>136693071363</imageOwnerId>"
_AMAZON = "<name>al2023-ami-2023.8.20250818.0-kernel-6.1-x86_64</name><imageOwnerId>137112412989</imageOwnerId>"
_COPY = "<name>training v3</name><imageOwnerId>123456789012</imageOwnerId><sourceImageId>{}</sourceImageId>"
OTHERS = {
    "ami-0000000000000de12": _DEBIAN,
    "ami-0000000000000a123": _AMAZON,
    "ami-0000000000000c0de": _COPY.format("ami-0000000000000a123"),
    "ami-0000000000000c0e0": _COPY.format("ami-0000000000000dead"),
}
"""Images that no parameter names, and what is said of them: Debian, Amazon Linux, what somebody has made from it, and
something made from an image that is gone."""
GP3 = {"EBS:VolumeUsage.gp3": 0.08, "EBS:VolumeP-IOPS.gp3": 0.005, "EBS:VolumeP-Throughput.gp3": 40.96}
"""What volumes cost a month: a GB, an IOPS, and a GiB/s."""
_PAGE = 100


def images(request: Request) -> Answer:
    """DescribeImages."""
    names = {id: name for name, id in IMAGES.items()} | OTHERS
    requested = listed(request.params, "ImageId")
    unknown = [id for id in requested if id not in names]
    if unknown:
        return error("ec2", "InvalidAMIID.NotFound", f"no image {', '.join(unknown)}")
    items = [
        f"<item><imageId>{id}</imageId><imageState>available</imageState>"
        f"<architecture>{'arm64' if 'arm64' in names[id] else 'x86_64'}</architecture>{OTHERS.get(id, '')}"
        "<rootDeviceName>/dev/sda1</rootDeviceName><rootDeviceType>ebs</rootDeviceType><blockDeviceMapping><item>"
        f"<deviceName>/dev/sda1</deviceName><ebs><volumeSize>{IMAGE_GB.get(id, 8)}</volumeSize></ebs></item>"
        "</blockDeviceMapping></item>"
        for id in requested or names
    ]
    return xml("DescribeImages", f"<imagesSet>{''.join(items)}</imagesSet>")


def parameter(request: Request) -> Answer:
    """GetParameter."""
    name = request.params.get("Name", "")
    if name not in IMAGES:
        return error("ssm", "ParameterNotFound", f"no parameter {name}")
    return reply({"Parameter": {"Name": name, "Type": "String", "Value": IMAGES[name], "Version": 1}})


def quota(request: Request, quotas: Mapping[str, float]) -> Answer:
    """GetServiceQuota."""
    code = request.params.get("QuotaCode", "")
    value = quotas.get(code, quotas.get("*", 0.0))
    return reply({"Quota": {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": code, "Value": value}})


def products(request: Request, demand: Callable[[str, str], Mapping[str, float]]) -> Answer:
    """GetProducts: on-demand prices of some types, or of all, and of gp3 volumes; a hundred a page."""
    asked: list[dict[str, str]] = json.loads(request.params.get("Filters", "[]"))
    requested = {item["Field"]: item["Value"] for item in asked}
    several = {item["Field"] for item in asked if item["Type"] == "ANY_OF"}
    region = requested.get("regionCode", "")
    if requested.get("volumeApiName") == "gp3":
        return reply({"FormatVersion": "aws_v1", "PriceList": [_product("usagetype", *p, region) for p in GP3.items()]})
    kinds = requested.get("instanceType", "")
    prices = {
        kind: price
        for one in (kinds.split(",") if "instanceType" in several else [kinds])
        for kind, price in demand(one, region).items()
    }
    first = int(request.params.get("NextToken") or 0)
    page = list(prices.items())[first : first + _PAGE]
    answer = {"FormatVersion": "aws_v1", "PriceList": [_product("instanceType", *item, region) for item in page]}
    more = {"NextToken": str(first + _PAGE)} if first + _PAGE < len(prices) else {}
    return reply({**answer, **more})


def _product(name: str, value: str, price: float, region: str) -> str:
    terms = {"t": {"priceDimensions": {"d": {"pricePerUnit": {"USD": f"{price:.10f}"}}}}}
    product = {"attributes": {name: value, "regionCode": region}}
    return json.dumps({"product": product, "terms": {"OnDemand": terms}})


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
