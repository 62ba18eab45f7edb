"""Who logs in on a machine: the user that its image has, by what AWS says of the image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["LOGIN", "USUAL", "login_user"]

USUAL = "ubuntu"
"""The user of AWS's parameters' images, and of an image of which nothing is known."""
LOGIN = (
    "Each image has a user of its own: ubuntu on Ubuntu, admin on Debian, ec2-user on Amazon Linux and Red Hat. "
    "Name that of your image: sky.AWS(username=...)."
)
"""What a user is told where machines refuse the login."""

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
    """The user of an image that DescribeImages has described; None if nothing in it says."""
    return (
        _named(image.get("Name"))
        or _OWNERS.get(str(image.get("OwnerId")))
        or _named(image.get("PlatformDetails"))
        or _named(image.get("Description"))
    )


def _named(text: object) -> str | None:
    found = _FIRST.search(str(text or ""))
    return None if found is None else list(_WORDS.values())[int(str(found.lastgroup)[1:])]
