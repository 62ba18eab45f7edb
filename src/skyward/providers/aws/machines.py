"""Instances as machines of a pool."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from skyward.api.provider import Admission, Leftover, Machine
from skyward.errors import CloudRefused, InvalidArgument
from skyward.machines.cloud import POOL, ends, expiry, note_end, price_of, ssh_target
from skyward.machines.ledger import Ledger
from skyward.machines.offers import Market, Price
from skyward.providers.aws.api import Api, as_dict, filters

__all__ = [
    "CloudMachine",
    "State",
    "Way",
    "admission",
    "check_programs",
    "check_way",
    "described",
    "end",
    "entrance",
    "find_endpoint",
    "machine",
    "note_ends",
    "proxy_command",
    "tagged",
]


_VALUES = 200  # that many values one filter takes
State = Literal["pending", "running", "stopping", "stopped", "shutting-down", "terminated"]


@dataclass(frozen=True)
class CloudMachine(Machine):
    region: str = ""
    zone: str = ""
    kind: str = ""
    market: Market = "on-demand"
    price: Price = field(default_factory=Price)
    launched: float = 0.0
    ended: float | None = None
    state: State = "pending"
    reason: str = ""
    token: str = ""
    """Of its launch; neither it nor the name of its key pair can change."""
    key_name: str = ""
    image: str = ""
    architecture: str = "x86_64"
    volumes: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict[str, str], hash=False)

    @property
    def alive(self) -> bool:
        return self.state not in ("shutting-down", "terminated")

    @property
    def preemptible(self) -> bool:
        return self.market == "spot"

    @property
    def gone(self) -> str:
        return "" if self.state in ("pending", "running") else f"AWS has ended it ({self.reason or self.state})"

    @property
    def taken_back(self) -> bool:
        return self.market == "spot" and self.reason.startswith("Server.Spot")

    @property
    def ready(self) -> bool:
        return self.state == "running" and self.ssh is not None

    def leftover(self) -> Leftover:
        cost = self.hourly_cost if self.alive else 0.0
        detail = f"{self.kind}, {self.state}"
        return Leftover(self.tags.get(POOL, ""), self.id, "machine", detail, cost, expiry(self.tags))


def described(api: Api, ids: Sequence[str], **how: Any) -> list[CloudMachine]:
    """In the order of the ids, without those that AWS does not show (yet, or any more)."""
    found: dict[str, CloudMachine] = {}
    for start in range(0, len(ids), _VALUES):
        some = _asked(api, filters(instance_id=ids[start : start + _VALUES]), **how)
        found |= {item.id: item for item in some}
    return [found[id] for id in ids if id in found]


def tagged(api: Api, **requested: str) -> list[CloudMachine]:
    return _asked(api, filters(**requested))


def end(api: Api, ids: Sequence[str]) -> dict[str, CloudRefused]:
    if not ids:
        return {}
    try:
        api.call("ec2", "terminate_instances", InstanceIds=list(ids), SkipOsShutdown=True)
    except CloudRefused as exc:
        if exc.kind in ("expired", "credentials", "permission", "throttled", "server"):
            raise
        if len(ids) == 1:
            return {ids[0]: exc}
        # One bad id spoils the call for all: the others go one by one.
        return {id: refused for one in ids for id, refused in end(api, [one]).items()}
    return {}


def machine(
    item: dict[str, Any],
    region: str,
    user: str = "ubuntu",
    private: bool = False,
    proxy: Callable[[str], str] | None = None,
) -> CloudMachine:
    tags = as_dict(item)
    price = price_of(tags)
    state: State = item["State"]["Name"]
    public_ip, private_ip = item.get("PublicIpAddress"), item.get("PrivateIpAddress") or ""
    address = private_ip if private or proxy else public_ip
    target = ssh_target(address, user, tags.get(POOL, "")) if address else None
    if target is not None and proxy is not None:
        target = replace(target, proxy=proxy(item["InstanceId"]), proxy_logins=LOGINS)
    launched = item.get("LaunchTime")
    reason: dict[str, str] = item.get("StateReason") or {}
    return CloudMachine(
        id=item["InstanceId"],
        private_ip=private_ip,
        public_ip=public_ip,
        ssh=target,
        region=region,
        zone=item.get("Placement", {}).get("AvailabilityZone", ""),
        kind=item.get("InstanceType", ""),
        market="spot" if item.get("InstanceLifecycle") == "spot" else "on-demand",
        hourly_cost=price.known_total,
        price=price,
        launched=launched.timestamp() if launched is not None else 0.0,
        ended=_ended(item.get("StateTransitionReason") or ""),
        state=state,
        reason=reason.get("Code", "") if state != "running" else "",
        token=item.get("ClientToken") or "",
        key_name=item.get("KeyName") or "",
        image=item.get("ImageId") or "",
        architecture=item.get("Architecture") or "x86_64",
        volumes=_volumes(item),
        tags=tags,
    )


def _asked(api: Api, requested: list[dict[str, Any]], **how: Any) -> list[CloudMachine]:
    reservations = api.pages("ec2", "describe_instances", "Reservations", Filters=requested)
    items: list[dict[str, Any]] = []
    for reservation in reservations:
        items += reservation.get("Instances") or []
    return [machine(item, api.account.region, **how) for item in items]


def _volumes(item: dict[str, Any]) -> tuple[str, ...]:
    mappings: list[dict[str, Any]] = item.get("BlockDeviceMappings") or []
    disks: list[dict[str, Any]] = [mapping.get("Ebs") or {} for mapping in mappings]
    return tuple(str(disk["VolumeId"]) for disk in disks if disk.get("DeleteOnTermination") and "VolumeId" in disk)


def _ended(reason: str) -> float | None:
    # "User initiated (2026-05-06 12:34:56 GMT)"
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", reason)
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() if found else None


# Ways in without an open address: ssh through Session Manager, or through an EC2 Instance Connect endpoint.
#
#     ssh ── ProxyCommand: aws ... ═══ HTTPS ═══ AWS ─┬─ SSM's agent on the machine ── its own port 22       "ssm"
#                                                     └─ the endpoint in the VPC ───── port 22              "eice"
#
# The program `aws` carries the bytes; ssh's own keys and host keys count on both ways.


Way = Literal["eice", "ssm"]
LOGINS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_INSTALL = "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"
_PLUGIN = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
)


@dataclass(frozen=True)
class Endpoint:
    id: str
    groups: tuple[str, ...]
    keeps_address: bool
    """Whether machines see the caller's address, and not the endpoint's."""


def check_way(via: object) -> None:
    if via is not None and via not in get_args(Way):
        raise InvalidArgument(
            f'via={via!r} is not a way to a machine. Say via="ssm" (Session Manager) or via="eice" (an EC2 Instance '
            "Connect endpoint), or leave it out: ssh then goes to the machine's own address."
        )


def check_programs(via: Way) -> None:
    if shutil.which("aws") is None:
        raise InvalidArgument(
            f'via="{via}" needs the program `aws`, which is not on the PATH. Nothing was created. '
            f"Install it: {_INSTALL}"
        )
    if via == "ssm" and shutil.which("session-manager-plugin") is None:
        raise InvalidArgument(
            'via="ssm" needs the program `session-manager-plugin` beside `aws`, and it is not on the PATH. Nothing was '
            f"created. Install it: {_PLUGIN}"
        )
    if via == "eice" and (version := _version()).startswith("1."):
        raise InvalidArgument(
            f'via="eice" needs version 2 of the program `aws`; this is {version}. Nothing was created. '
            f"Install it: {_INSTALL}"
        )


def proxy_command(via: Way, region: str, profile: str | None, id: str) -> str:
    argv = ["aws"]
    if via == "ssm":
        argv += ["ssm", "start-session", "--target", id, "--document-name", "AWS-StartSSHSession"]
        argv += ["--parameters", "portNumber=22"]
    else:
        argv += ["ec2-instance-connect", "open-tunnel", "--instance-id", id, "--remote-port", "22"]
    argv += ["--region", region]
    argv += ["--profile", profile] if profile is not None else []
    return shlex.join(argv).replace("%", "%%")


def find_endpoint(api: Api, vpc: str) -> Endpoint:
    found = [
        item
        for item in api.pages("ec2", "describe_instance_connect_endpoints", "InstanceConnectEndpoints")
        if item.get("VpcId") == vpc and item.get("State") == "create-complete"
    ]
    if not found:
        raise InvalidArgument(
            f'via="eice": {vpc} has no EC2 Instance Connect endpoint that is ready. Nothing was created. Make one, '
            "once for the VPC and free of charge: aws ec2 create-instance-connect-endpoint --region "
            f"{api.account.region} --subnet-id subnet-..."
        )
    first = found[0]
    groups = tuple(first.get("SecurityGroupIds") or ())
    return Endpoint(str(first["InstanceConnectEndpointId"]), groups, bool(first.get("PreserveClientIp")))


def entrance(endpoint: Endpoint | None) -> list[dict[str, Any]]:
    """Rules by which ssh gets in; none for SSM."""
    if endpoint is None:
        return []
    pairs = [{"GroupId": group, "Description": f"endpoint {endpoint.id}"} for group in endpoint.groups]
    return [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "UserIdGroupPairs": pairs}]


def admission(via: Way) -> Admission:
    if via == "ssm":
        return Admission(
            allowed="ssh goes through Session Manager. The machine needs SSM's agent (AWS's and Ubuntu's images have "
            "it), a role that allows it (instance_profile=..., with the policy AmazonSSMManagedInstanceCore), and a "
            "way to SSM: a public address, NAT, or VPC endpoints for ssm, ssmmessages and ec2messages. You need "
            "ssm:StartSession."
        )
    return Admission(
        allowed="ssh goes through the VPC's EC2 Instance Connect endpoint. The endpoint's security group must let out "
        "tcp port 22 to the machines, and you need ec2-instance-connect:OpenTunnel."
    )


def _version() -> str:
    try:
        done = subprocess.run(["aws", "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # it may still work, and says why if it does not
    found = re.search(r"aws-cli/(\S+)", done.stdout + done.stderr)
    return found[1] if found else ""


def note_ends(ledger: Ledger, machines: Sequence[CloudMachine], by_us: bool = False) -> None:
    """`by_us`: all of them, just now."""
    for machine in machines:
        if not (by_us or machine.gone) or machine.id in ends(ledger.history):
            continue
        when = time.time() if by_us else machine.ended or time.time()
        note_end(ledger, machine.id, when, machine.taken_back and not by_us)
