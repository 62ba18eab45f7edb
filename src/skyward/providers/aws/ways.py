"""Ways in without an open address: ssh through Session Manager, or through an EC2 Instance Connect endpoint.

    ssh ── ProxyCommand: aws ... ═══ HTTPS ═══ AWS ─┬─ SSM's agent on the machine ── its own port 22       "ssm"
                                                    └─ the endpoint in the VPC ───── port 22              "eice"

The program `aws` carries the bytes; ssh's own keys and host keys count on both ways.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Literal, get_args

from skyward.api.provider import Admission
from skyward.errors import InvalidArgument
from skyward.providers.aws.api import Api

# fmt: off
__all__ = [
    "LOGINS", "Endpoint", "Way",
    "admission", "check_programs", "check_way", "entrance", "find_endpoint", "proxy_command",
]
# fmt: on

Way = Literal["eice", "ssm"]
LOGINS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
"""The variables by which the program `aws` may log in."""
_INSTALL = "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"
_PLUGIN = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
)


@dataclass(frozen=True)
class Endpoint:
    """An EC2 Instance Connect endpoint of a VPC."""

    id: str
    groups: tuple[str, ...]
    keeps_address: bool
    """Whether machines see the caller's address, and not the endpoint's."""


def check_way(via: object) -> None:
    """Refuses a way that there is not."""
    if via is not None and via not in get_args(Way):
        raise InvalidArgument(
            f'via={via!r} is no way to a machine. Say via="ssm" (Session Manager) or via="eice" (an EC2 Instance '
            "Connect endpoint), or leave it out: ssh then goes to the machine's own address."
        )


def check_programs(via: Way) -> None:
    """Refuses to begin where the programs are missing that carry ssh's bytes."""
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
    """What ssh runs to reach a machine, as a value of its option ProxyCommand."""
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
    """The VPC's endpoint, which has to be there before anything is created."""
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
    """The rules by which ssh gets in: from the endpoint; none for SSM, whose agent is on the machine itself."""
    if endpoint is None:
        return []
    pairs = [{"GroupId": group, "Description": f"endpoint {endpoint.id}"} for group in endpoint.groups]
    return [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "UserIdGroupPairs": pairs}]


def admission(via: Way) -> Admission:
    """What has to be right for this way, for the message about a machine that does not answer."""
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
