"""The first thing to run with an AWS account: what works there, what is missing, and why, for less than a cent.

    python aws_check.py                    checks, launches one small machine, uses it, gives it back, prints a report
    python aws_check.py --no-machine       the same without a machine: costs nothing
    python aws_check.py --region eu-west-1 --profile ml

Before anything is launched, credentials, permissions (each action as a dry run), quotas, the network and prices are
asked for. Then one machine of one type (`--type`) is up for a few minutes: a pool opens, a call runs, the lease is
looked at, and everything is confirmed gone. The report has no keys, names or account numbers in it: send it to us.
"""

import argparse
import base64
import math
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import skyward as sky
from skyward.errors import SkywardError

TYPE = "t3.small"
DOLLARS_AN_HOUR = 0.05  # what the machine may cost at most, disk and address included
MINUTES = 20  # after which the machine ends itself, whatever happens here

# What the policy of docs/aws-policy.json allows, and how it is asked for without doing it.
LOOKS = (
    "DescribeCapacityReservations DescribeImages DescribeInstanceConnectEndpoints DescribeInstanceTypeOfferings "
    "DescribeInstanceTypes DescribeInstances "
    "DescribeKeyPairs DescribePlacementGroups DescribeRouteTables DescribeSecurityGroups DescribeSpotPriceHistory "
    "DescribeSubnets DescribeVolumes"
).split()
CREATES = ("CreateSecurityGroup", "ImportKeyPair", "CreatePlacementGroup", "RunInstances")
# These can only be asked of something that exists: it is asked while the machine is there.
CHANGES = (
    "AuthorizeSecurityGroupEgress AuthorizeSecurityGroupIngress RevokeSecurityGroupIngress DeleteKeyPair "
    "DeletePlacementGroup DeleteSecurityGroup "
    "DeleteVolume TerminateInstances"
).split()
# Only pools with Image(warm=True) need these, of an image that does not exist here: they are not asked for.
WARM = ("CreateImage", "DeregisterImage", "DeleteSnapshot")
QUOTAS = {
    "vCPUs of ordinary machines, on-demand": "L-1216C47A",
    "vCPUs of ordinary machines, spot": "L-34B43A08",
    "vCPUs of G machines (GPUs), on-demand": "L-DB2E81BA",
    "vCPUs of G machines (GPUs), spot": "L-3819A6DF",
    "vCPUs of P machines (GPUs), on-demand": "L-417A185B",
    "vCPUs of P machines (GPUs), spot": "L-7212CCBC",
}
NEEDED = "L-1216C47A"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGvK2m5kPjjH1vyk2kC4Y3iFZ0kq0hRrG4j7f0l1dW9L"  # of nobody


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    what: str
    state: str
    text: str

    def __str__(self) -> str:
        return f"[{self.state:^7}] {self.what}: {clean(self.text)}"


class Report:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, what: str, state: str, text: str) -> None:
        self.rows.append(Row(what, state, " ".join(text.split())))
        print(self.rows[-1], flush=True)

    @property
    def problems(self) -> list[Row]:
        return [row for row in self.rows if row.state == "problem"]


def clean(text: str) -> str:
    """A text without account numbers, keys, names of users and addresses of computers."""
    text = re.sub(r" ?Encoded authorization failure message:? ?\S*", "", text)
    text = re.sub(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{8,}\b", "(key)", text)
    text = re.sub(r"\b(arn:[\w-]+:\w+:[\w-]*:)\d{8}(\d{4}):[^\s,]+", r"\1...\2:(name)", text)
    text = re.sub(r"\b\d{8}(\d{4})\b", r"...\1", text)
    return re.sub(r"\b(?!169\.254)\d{1,3}(?:\.\d{1,3}){3}\b", "(address)", text)


def said(exc: Exception) -> str:
    """What AWS answered, in one line: code and message."""
    response: Any = getattr(exc, "response", {})
    error = response.get("Error", {})
    return f"{error.get('Message', exc)} ({error.get('Code', type(exc).__name__)})"


def code(exc: Exception) -> str:
    """The code of an answer of AWS."""
    response: Any = getattr(exc, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


class Check:
    """The checks, in the order in which they are made."""

    def __init__(self, provider: sky.AWS, kind: str, report: Report) -> None:
        import boto3

        self.provider, self.kind, self.report = provider, kind, report
        session = boto3.Session(profile_name=provider.profile, region_name=provider.region)
        self.client: Callable[[str], Any] = lambda service: session.client(
            service,
            endpoint_url=provider.endpoint_url,
            region_name="us-east-1" if service == "pricing" else provider.region,
        )
        self.ec2 = self.client("ec2")
        self.owner = ""
        self.subnet = self.vpc = ""

    def run(self, machine: bool) -> None:
        """All checks; the machine only if nothing that it needs is missing."""
        packages = ", ".join(f"{name} {version(name)}" for name in ("skyward", "boto3"))
        self.report.add("programs", "ok", f"{packages}, Python {platform.python_version()}, {platform.system()}")
        if not self.credentials():
            return
        self.network()
        self.permissions()
        self.quotas()
        self.prices()
        if not machine:
            self.report.add("machine", "skipped", "--no-machine was said.")
        elif self.report.problems:
            names = ", ".join(row.what for row in self.report.problems)
            self.report.add("machine", "skipped", f"nothing is launched while there are problems: {names}.")
        else:
            self.machine()

    def credentials(self) -> bool:
        """Who is logged in, without names."""
        try:
            found = self.client("sts").get_caller_identity()
        except Exception as exc:  # whatever boto3 says of a login is for the report
            self.report.add("credentials", "problem", f"no login that AWS accepts: {said(exc)}. Run `aws configure`.")
            return False
        self.owner = re.sub(r"(:assumed-role/(?!AWSReservedSSO_)[^/]+)/.*", r"\1", found["Arn"])
        kinds = {
            ":user/": "an IAM user",
            "AWSReservedSSO": "single sign-on",
            ":assumed-role/": "a role",
            ":root": "root",
        }
        kind = next((text for part, text in kinds.items() if part in found["Arn"]), "a login")
        self.report.add("credentials", "ok", f"{kind} of account ...{found['Account'][-4:]}, {self.provider.region}")
        return True

    def network(self) -> None:
        """Where a machine would stand."""
        try:
            mine = [{"Name": "default-for-az", "Values": ["true"]}]
            subnets = self.ec2.describe_subnets(Filters=mine)["Subnets"]
        except Exception as exc:
            self.report.add("network", "problem", f"subnets cannot be listed: {said(exc)}")
            return
        if not subnets:
            self.report.add(
                "network",
                "problem",
                f"there is no default VPC in {self.provider.region}. Make one with `aws ec2 create-default-vpc`, or "
                'name a subnet: sky.AWS(subnet_id="subnet-...").',
            )
            return
        self.subnet, self.vpc = subnets[0]["SubnetId"], subnets[0]["VpcId"]
        zones = sorted(item["AvailabilityZone"] for item in subnets)
        self.report.add("network", "ok", f"the default VPC has subnets in {', '.join(zones)}")

    def permissions(self) -> None:
        """Every action that needs nothing of ours to exist."""
        for action, asked in self._first_questions():
            self._ask(action, asked)
        self._counted("permissions to look and to create")
        self._services()

    def quotas(self) -> None:
        """How many vCPUs the account may have; 0 is usual for GPUs in new accounts."""
        client = self.client("service-quotas")
        for name, quota in QUOTAS.items():
            try:
                value = client.get_service_quota(ServiceCode="ec2", QuotaCode=quota)["Quota"]["Value"]
            except Exception as exc:
                why = f"{said(exc)}. Skyward does not need to ask; a launch that goes over it says so."
                self.report.add("quotas", "unknown", f"servicequotas:GetServiceQuota is not answered: {why}")
                return
            if value > 0:
                state, text = "ok", f"{value:g}"
            elif quota == NEEDED:
                state, text = "problem", "0: no machine can be launched"
            else:
                state, text = "none", "0: ask for more under Service Quotas in the AWS console before you need it"
            self.report.add(f"quota {quota}, {name}", state, text)

    def prices(self) -> None:
        """What the machine would cost, by the plan of a pool."""
        try:
            plan = sky.plan(**self._wanted())
        except SkywardError as exc:
            self.report.add("prices", "problem", str(exc))
            return
        price = plan.hourly_cost
        if not plan.offers:
            why = "; ".join(map(str, plan.ruled_out)) or "EC2 does not list it"
            self.report.add("prices", "problem", f"{self.kind} cannot be launched: {why}. Name another with --type.")
        elif price == math.inf:
            self.report.add("prices", "unknown", f"what {self.kind} costs is not known; it is launched all the same.")
        elif price > DOLLARS_AN_HOUR:
            text = f"{self.kind} costs ${price:.4f} an hour, more than this check should. Name another with --type."
            self.report.add("prices", "problem", text)
        else:
            self.report.add("prices", "ok", f"{self.kind} on-demand, ${price:.4f} an hour")

    def machine(self) -> None:
        """One machine: up, used, and confirmed gone."""
        pool = sky.ComputePool(**self._wanted(), name="aws-check", ttl=60 * MINUTES, console=False)
        pool.on_event(lambda event: print(f"          {event.text}") if isinstance(event, sky.events.Notice) else None)
        began = time.monotonic()
        try:
            with pool:
                self.report.add("pool", "ok", f"open after {time.monotonic() - began:.0f} s")
                self.used(pool)
        except Exception as exc:
            self.report.add("pool", "problem", f"after {time.monotonic() - began:.0f} s: {exc}")
        receipt: Any = pool.receipt
        if receipt is not None:
            left = sorted(set(receipt.created) - set(receipt.gone))
            state, text = (
                ("problem", f"not confirmed gone: {', '.join(left)}") if left else ("ok", "all confirmed gone")
            )
            paid = f"{len(receipt.created)} things created, {text}; ${receipt.total:.4f} in all"
            self.report.add("teardown", state, paid)
        left = [item for item in self.provider.find() if item.pool.startswith("aws-check-") and not item.foreign]
        if left:
            self.report.add(
                "teardown", "problem", f"AWS still lists {', '.join(map(str, left))}. Run `sky down --all`."
            )

    def used(self, pool: Any) -> None:
        """What a pool is for, and what guards it."""
        began = time.monotonic()
        node = describe() >> pool
        self.report.add("call", "ok", f"answered in {time.monotonic() - began:.2f} s by {node['system']}")
        lease = node["lease"]
        state = "ok" if lease is not None and lease < self.provider.lease else "problem"
        ends = (
            f"renewed {lease:.0f} s ago" if lease is not None else "there is none, so the machine would not end itself"
        )
        self.report.add("lease", state, f"{ends}; systemd says of it: {node['unit']}")
        for action, asked in self._last_questions():
            self._ask(action, asked)
        self._counted("permissions to change and to end")

    def _wanted(self) -> dict[str, Any]:
        return {
            "provider": self.provider,
            "nodes": 1,
            "vcpus": 1,
            "memory_gb": 1,
            "allocation": "on-demand",
        }

    def _ask(self, action: str, asked: dict[str, Any]) -> None:
        """Has EC2 say whether an action is allowed, without doing it."""
        operation = re.sub(r"(?<!^)(?=[A-Z])", "_", action).lower()
        try:
            getattr(self.ec2, operation)(DryRun=True, **asked)
        except Exception as exc:
            if code(exc) == "DryRunOperation":
                return  # it would have been done
            if code(exc) == "UnauthorizedOperation":
                text = "not allowed for this login. docs/aws-policy.json lists all that Skyward needs."
            else:
                text = f"EC2 answers the dry run with: {said(exc)}"
            self.report.add(f"permission ec2:{action}", "problem", text)

    def _counted(self, what: str) -> None:
        if not any(row.what.startswith("permission ec2:") for row in self.report.problems):
            self.report.add(what, "ok", "every action is allowed (asked as dry runs)")

    def _services(self) -> None:
        image = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
        try:
            self.client("ssm").get_parameter(Name=image)
            self.report.add("permission ssm:GetParameter", "ok", "the newest Ubuntu image is known")
        except Exception as exc:
            self.report.add("permission ssm:GetParameter", "problem", said(exc))
        try:
            self.client("pricing").get_products(ServiceCode="AmazonEC2", MaxResults=1)
            self.report.add("permission pricing:GetProducts", "ok", "prices can be asked for")
        except Exception as exc:
            self.report.add("permission pricing:GetProducts", "unknown", f"plans show no prices: {said(exc)}")

    def _tags(self, *kinds: str) -> list[dict[str, Any]]:
        pairs = {
            "skyward:pool": "aws-check",
            "skyward:owner": self.provider.owner or self.owner,
            "skyward:expires-at": "2030-01-01T00:00:00Z",
            "skyward:version": version("skyward"),
        }
        tags = [{"Key": key, "Value": value} for key, value in pairs.items()]
        return [{"ResourceType": kind, "Tags": tags} for kind in kinds]

    def _first_questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for action in LOOKS:
            yield action, {"Owners": ["self"]} if action == "DescribeImages" else {}
        yield (
            "ImportKeyPair",
            {
                "KeyName": "skyward-aws-check",
                "PublicKeyMaterial": PUBLIC_KEY.encode(),
                "TagSpecifications": self._tags("key-pair"),
            },
        )
        yield (
            "CreatePlacementGroup",
            {
                "GroupName": "skyward-aws-check",
                "Strategy": "cluster",
                "TagSpecifications": self._tags("placement-group"),
            },
        )
        if not self.vpc:
            return  # the report says that there is no network
        yield (
            "CreateSecurityGroup",
            {
                "GroupName": "skyward-aws-check",
                "Description": "a dry run",
                "VpcId": self.vpc,
                "TagSpecifications": self._tags("security-group"),
            },
        )
        image = self._image()
        if image:
            yield (
                "RunInstances",
                {
                    "ImageId": image,
                    "InstanceType": self.kind,
                    "MinCount": 1,
                    "MaxCount": 1,
                    "NetworkInterfaces": [
                        {"DeviceIndex": 0, "SubnetId": self.subnet, "AssociatePublicIpAddress": True}
                    ],
                    "UserData": base64.b64encode(b"#cloud-config\n").decode(),
                    "TagSpecifications": self._tags("instance", "volume", "network-interface"),
                },
            )

    def _last_questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        mine = {"Filters": [{"Name": "tag:skyward:owner", "Values": [self.provider.owner or self.owner]}]}
        machines = [i for r in self.ec2.describe_instances(**mine)["Reservations"] for i in r["Instances"]]
        groups = self.ec2.describe_security_groups(**mine)["SecurityGroups"]
        disks = self.ec2.describe_volumes(**mine)["Volumes"]
        keys = self.ec2.describe_key_pairs(**mine)["KeyPairs"]
        rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.1/32"}]}
        if machines:
            yield "TerminateInstances", {"InstanceIds": [machines[0]["InstanceId"]]}
        if groups:
            group = groups[0]["GroupId"]
            yield "AuthorizeSecurityGroupIngress", {"GroupId": group, "IpPermissions": [rule]}
            yield "AuthorizeSecurityGroupEgress", {"GroupId": group, "IpPermissions": [rule]}
            yield "RevokeSecurityGroupIngress", {"GroupId": group, "IpPermissions": [rule]}
            yield "DeleteSecurityGroup", {"GroupId": group}
        if disks:
            yield "DeleteVolume", {"VolumeId": disks[0]["VolumeId"]}
        if keys:
            yield "DeleteKeyPair", {"KeyName": keys[0]["KeyName"]}

    def _image(self) -> str:
        name = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
        try:
            return str(self.client("ssm").get_parameter(Name=name)["Parameter"]["Value"])
        except Exception:  # the report says so of ssm:GetParameter
            return ""


@sky.compute
def describe() -> dict[str, Any]:
    """What a body sees of the machine: its system, and what would end it."""
    import os
    import platform
    import subprocess
    import time
    from pathlib import Path

    from skyward.machines.cloud import LEASE_FILE

    release = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    name = next((line.partition("=")[2].strip('"') for line in release.splitlines() if line.startswith("PRETTY")), "?")
    try:
        unit = subprocess.run(
            ["systemctl", "is-active", "skyward-lease"], capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        unit = ""
    lease = time.time() - os.stat(LEASE_FILE).st_mtime if os.path.exists(LEASE_FILE) else None
    return {"system": f"{name}, Python {platform.python_version()}", "lease": lease, "unit": unit or "no systemd"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print the report; the exit status is 1 if there are problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--region", default="", help="as your other AWS tools, if not given")
    parser.add_argument("--profile", help="of your AWS settings")
    parser.add_argument("--type", default=TYPE, help=f"the machine to launch ({TYPE})")
    parser.add_argument("--no-machine", action="store_true", help="launch nothing")
    parser.add_argument("--ssh-from", help="the address that may log in, if it cannot be found out")
    parser.add_argument("--username", default="ubuntu", help="the image's user")
    given = parser.parse_args(arguments)
    report = Report()
    provider = sky.AWS(
        region=given.region,
        profile=given.profile,
        instance_types=[given.type],
        ssh_from=given.ssh_from,
        username=given.username,
    )
    print("--- report of aws_check.py ---")
    Check(provider, given.type, report).run(machine=not given.no_machine)
    print(f"--- {len(report.problems) or 'no'} problem{'' if len(report.problems) == 1 else 's'} ---")
    print("You may send everything between the two lines: account numbers, keys, names and addresses are left out.")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
