"""AWS: which user logs in on machines of an image."""

from __future__ import annotations

import pytest

from skyward.api.spec import Spec
from skyward.providers.aws.images import login_user
from tests.support.cloud import Cloud
from tests.support.leases import returned

T4 = Spec(accelerator="T4", nodes=1)
DEBIAN, AMAZON = "ami-0000000000000de12", "ami-0000000000000a123"
MADE_FROM_AMAZON, MADE_FROM_WHAT_IS_GONE = "ami-0000000000000c0de", "ami-0000000000000c0e0"


@pytest.mark.parametrize(
    ("name", "user"),
    [
        ("ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20250821", "ubuntu"),
        ("Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20250822", "ubuntu"),
        ("Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) 20250822", "ec2-user"),
        ("debian-12-amd64-20250814-2204", "admin"),
        ("al2023-ami-2023.8.20250818.0-kernel-6.1-x86_64", "ec2-user"),
        ("amzn2-ami-kernel-5.10-hvm-2.0.20250818.2-x86_64-gp2", "ec2-user"),
        ("RHEL-9.6.0_HVM-20250618-x86_64-0-Hourly2-GP3", "ec2-user"),
        ("suse-sles-15-sp7-v20250620-hvm-ssd-x86_64", "ec2-user"),
        ("Rocky-9-EC2-Base-9.6-20250531.0.x86_64", "rocky"),
        ("AlmaLinux OS 9.6.20250522 x86_64", "ec2-user"),
        ("CentOS Stream 9 x86_64 20250818", "ec2-user"),
        ("CentOS Linux 7 x86_64 HVM EBS", "centos"),
        ("Fedora-Cloud-Base-AmazonEC2.x86_64-42-1.1", "fedora"),
        ("debian-12 with tools as in our Ubuntu image", "admin"),
        ("reuse-me", None),
        ("training v3", None),
        ("", None),
    ],
)
def test_the_name_of_an_image_says_its_user(name: str, user: str | None) -> None:
    assert login_user({"Name": name}) == user


def test_where_the_name_says_nothing_owner_platform_and_description_do() -> None:
    assert login_user({"Name": "x", "OwnerId": "136693071363"}) == "admin"
    assert login_user({"Name": "x", "PlatformDetails": "Red Hat Enterprise Linux"}) == "ec2-user"
    assert login_user({"Name": "x", "PlatformDetails": "Linux/UNIX", "Description": "Rocky Linux 9"}) == "rocky"
    assert login_user({}) is None


@pytest.mark.parametrize(
    ("settings", "user"),
    [
        ({"ami": DEBIAN}, "admin"),
        ({"ami": AMAZON}, "ec2-user"),
        ({"ami": MADE_FROM_AMAZON}, "ec2-user"),
        ({"ami": MADE_FROM_WHAT_IS_GONE}, "ubuntu"),
        ({"ami": DEBIAN, "username": "me"}, "me"),
        ({}, "ubuntu"),
    ],
)
def test_machines_are_reached_as_the_user_of_their_image(cloud: Cloud, settings: dict[str, str], user: str) -> None:
    provider = cloud.aws(**settings)
    held = provider.acquire(T4, "p")
    asked = len([call for call in cloud.calls if call.action == "DescribeImages"])
    again = held.refresh(held.machines)
    assert [machine.ssh.user for machine in (*held.machines, *again) if machine.ssh] == [user, user]
    assert len([call for call in cloud.calls if call.action == "DescribeImages"]) == asked
    assert provider.access.login.endswith("Name that of your image: sky.AWS(username=...).")
    returned(held)
