"""The settings of the provider, checked when it is made and before AWS is asked."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from skyward.api.image import check_number
from skyward.errors import InvalidArgument

__all__ = ["check_endpoint", "check_region", "check_settings", "check_zones", "tag_pairs", "texts", "usual_region"]

# What a value looks like, and an example that says it to people.
_FORMS = {
    "region": (r"[a-z]{2,}(-[a-z]+)+-\d+", "us-east-1"),
    "zones": (r"[a-z]{2,}(-[a-z0-9]+)+", "us-east-1a"),
    "instance_types": (r"[a-z0-9*?][a-z0-9-*?]*(\.[a-z0-9-*?]+)?", "g5.xlarge"),
    "ami": (r"ami-[0-9a-z]+", "ami-0123456789abcdef0"),
    "subnet_id": (r"subnet-[0-9a-z]+", "subnet-0123456789abcdef0"),
    "security_group_id": (r"sg-[0-9a-z]+", "sg-0123456789abcdef0"),
    "capacity_reservation": (r"cr-[0-9a-z]+", "cr-0123456789abcdef0"),
    "ubuntu_version": (r"\d\d\.\d\d", "24.04"),
    "username": (r"[a-z_][a-z0-9_.-]*", "ubuntu"),
    "instance_profile": (r"[\w+=,.@:/-]+", "my-role"),
}
# Hosts of AWS itself, as the whole network location: no port, no login.
_AMAZON = re.compile(r"^[a-z0-9.-]+\.(amazonaws\.com|amazonaws\.com\.cn|api\.aws)$")
_RESERVED = ("aws:", "skyward:")


def check_settings(aws: Any, boot: float) -> None:
    for name in ("region", "ubuntu_version"):
        check_text(name, getattr(aws, name))
    for name in ("ami", "username", "security_group_id", "instance_profile", "capacity_reservation"):
        if getattr(aws, name) is not None:
            check_text(name, getattr(aws, name))
    for name in ("use_private_ip", "burstable", "exclude_burstable"):
        check_flag(name, getattr(aws, name))
    for name in ("placement_group", "efa"):
        if getattr(aws, name) is not None:
            check_flag(name, getattr(aws, name))
    if aws.root_disk_gb is not None:
        check_number("root_disk_gb", aws.root_disk_gb)
    check_throughput(aws.root_disk_throughput)
    check_burstable(aws.burstable, aws.exclude_burstable)
    for name in ("request_timeout", "lease", "ssh_timeout"):
        check_number(name, getattr(aws, name), whole=False)
    check_lease(aws.lease, boot)


def check_text(name: str, value: object) -> None:
    form, example = _FORMS[name]
    if not isinstance(value, str) or not re.fullmatch(form, value):
        what = "no region of AWS" if name == "region" else "nothing that AWS would know"
        raise InvalidArgument(f'{name}={value!r} is {what}. Write it like "{example}".')


def check_endpoint(recorded: str, known: str | None, environ: Mapping[str, str], settings: str = "") -> None:
    """Refuses to send signed requests where only a ledger or a settings file says."""
    from urllib.parse import urlsplit

    own = {value for name, value in environ.items() if name.startswith("AWS_ENDPOINT_URL")}
    parts = urlsplit(recorded)
    if recorded == known or recorded in own or (parts.scheme == "https" and _AMAZON.search(parts.netloc)):
        return
    if settings:
        raise InvalidArgument(
            f"{settings} names the endpoint {recorded!r}. Requests to it would be signed with your credentials, and "
            "such a file may come from somebody else. If the endpoint is yours, say so: "
            f"export AWS_ENDPOINT_URL={shlex.quote(recorded)}."
        )
    raise InvalidArgument(
        f"the ledger of this pool names the endpoint {recorded!r}, and your settings do not. Requests to it would be "
        f"signed with your credentials. If it is yours, say so: sky down --endpoint-url {shlex.quote(recorded)}, or "
        "set AWS_ENDPOINT_URL."
    )


def texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple | set | frozenset):
        example = _FORMS[name][1]
        raise InvalidArgument(f'{name}={value!r} is neither a text nor a list of them. Write {name}=["{example}"].')
    found: tuple[Any, ...] = (value,) if isinstance(value, str) else tuple(cast("Sequence[Any]", value))
    for each in found:
        check_text(name, each)
    return found


def usual_region(profile: str | None, environ: Mapping[str, str]) -> str:
    named = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if named and profile is None:
        return named
    settings = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        settings.read(Path(environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(), "utf-8")
    except (configparser.Error, OSError, UnicodeError, RuntimeError):
        settings.clear()  # boto3 says what is wrong with it
    name = profile or environ.get("AWS_PROFILE") or "default"
    sections = (f"profile {name}", name) if name == "default" else (f"profile {name}",)
    found = [settings[section]["region"] for section in sections if settings.has_option(section, "region")]
    return (found[0] if found else named) or "us-east-1"


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r}: expected True or False.")


def check_throughput(value: object) -> None:
    if value is not None and not (type(value) is int and 125 <= value <= 2000):
        raise InvalidArgument(
            f"root_disk_throughput={value!r}: gp3 volumes have 125 to 2000 MiB/s. Give a number of these."
        )


def check_burstable(burstable: bool, excluded: bool) -> None:
    if burstable and excluded:
        raise InvalidArgument("burstable=True and exclude_burstable=True contradict each other. Give one of them.")


def tag_pairs(tags: object) -> tuple[tuple[str, str], ...]:
    given: Any = cast("Mapping[Any, Any]", tags).items() if isinstance(tags, Mapping) else tags
    try:
        pairs = tuple((str(key), str(value)) for key, value in given)
    except (TypeError, ValueError):
        raise InvalidArgument(f'tags={tags!r} are not names with values. Write tags={{"team": "ml"}}.') from None
    for key, value in pairs:
        if not 1 <= len(key) <= 128 or len(value) > 256:
            raise InvalidArgument(f"tags: {key!r} is too long; AWS takes 128 characters for a name, 256 for a value.")
        if key.lower().startswith(_RESERVED):
            raise InvalidArgument(f"tags: names that begin with {key.partition(':')[0]}: are reserved. Rename {key!r}.")
    if len(pairs) > 40:
        raise InvalidArgument(
            f"tags: {len(pairs)} of them; AWS allows 50 per resource, including Skyward's. Give 40 or fewer."
        )
    return pairs


def check_lease(lease: float, boot: float) -> None:
    if lease < boot:
        raise InvalidArgument(
            f"lease={lease:g}: a machine may need {boot:g} s to boot, and would end itself before it hears from us. "
            f"Give {boot:g} or more; 900 is usual."
        )


def check_region(session: Any, region: str) -> None:
    known: list[str] = []
    for partition in session.get_available_partitions():
        known += session.get_available_regions("ec2", partition_name=partition)
    if region in known:
        return
    near = get_close_matches(region, known, n=3, cutoff=0.6) or ["us-east-1", "us-west-2", "eu-central-1"]
    raise InvalidArgument(
        f"region={region!r}: AWS has no such region, or it is newer than the installed boto3. Nothing was created. "
        f"Near ones: {', '.join(near)}. Take one of them, or update: pip install -U boto3."
    )


def check_zones(zones: Sequence[str], there: Sequence[str], region: str) -> None:
    missing = [zone for zone in zones if zone not in there]
    if missing:
        what = "is" if len(missing) == 1 else "are"
        raise InvalidArgument(
            f"zones: {', '.join(missing)} {what} not in {region}, or without a subnet. Nothing was created. "
            f"Name some of {', '.join(sorted(set(there)))}, or give a subnet there: sky.AWS(subnet_id=...)."
        )
