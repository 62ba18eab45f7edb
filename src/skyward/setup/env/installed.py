"""What the running interpreter and this computer have already."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from typing import TYPE_CHECKING

from skyward.api.image import requirement_path
from skyward.errors import BootstrapError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from packaging.requirements import Requirement

__all__ = ["missing_apt", "missing_pip"]


def missing_pip(entries: Iterable[str]) -> list[str]:
    """Those `pip` entries that the running interpreter does not satisfy."""
    wanted = list(entries)
    if not wanted:
        return []
    from packaging.requirements import InvalidRequirement, Requirement

    def satisfied(entry: str) -> bool:
        if requirement_path(entry):
            return False  # what is installed may be older than what lies there
        try:
            return _satisfied(Requirement(entry), set())
        except InvalidRequirement:
            return False  # a bare URL: only fetching it tells what it is

    return [entry for entry in wanted if not satisfied(entry)]


def missing_apt(names: Iterable[str]) -> list[str]:
    """Those Debian packages, each a name or name=version, that are not installed."""
    wanted = list(names)
    if not wanted:
        return []
    query = shutil.which("dpkg-query")
    if query is None:
        raise BootstrapError(
            "looking for apt packages",
            f"this computer has no dpkg, so it cannot tell whether it has {', '.join(wanted)}. "
            "Install them with its own package manager and leave apt out of the image.",
        )
    return [entry for entry in wanted if not _has_debian(query, *entry.partition("=")[::2])]


def _satisfied(requirement: Requirement, seen: set[str]) -> bool:
    if str(requirement) in seen or (requirement.marker and not requirement.marker.evaluate()):
        return True
    from importlib import metadata

    seen.add(str(requirement))
    try:
        installed = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    if requirement.url:
        origin = installed.read_text("direct_url.json")
        return bool(origin) and json.loads(origin or "{}").get("url") == requirement.url and not requirement.extras
    # A version that is installed was chosen by the user, pre-release or not.
    if not requirement.specifier.contains(installed.version, prereleases=True):
        return False
    return all(_satisfied(needed, seen) for needed in _needs_of_extras(requirement, installed))


def _needs_of_extras(requirement: Requirement, installed: Distribution) -> Iterable[Requirement]:
    """What the extras that `requirement` names ask for beyond the package's own needs."""
    from packaging.requirements import Requirement

    for extra in requirement.extras:
        for line in installed.requires or []:
            needed = Requirement(line)
            marker = needed.marker
            if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                needed.marker = None
                yield needed


def _has_debian(query: str, name: str, version: str) -> bool:
    command = [query, "--show", "--showformat=${db:Status-Status} ${Version}\n", name]
    from skyward.api.program_env import installer_environment  # most images have no Debian packages

    variables = installer_environment(os.environ)
    answer = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=False)
    states = [line.split(" ") for line in answer.stdout.splitlines()]
    return any(state == "installed" and version in ("", found) for state, found in states)
