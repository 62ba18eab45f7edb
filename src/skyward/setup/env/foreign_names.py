"""Names that come from indexes and hosts, checked before they become part of a path or of a command."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from skyward.api.image import mask
from skyward.errors import BootstrapError

__all__ = ["check_digest", "check_host_path", "check_platform", "file_name"]

# As the specification of wheels has it; the file name of an sdist has fewer characters.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*\.(?:whl|zip|tar\.gz|tgz|tar\.bz2|tar\.xz)")
_LONGEST = 240
_DIGEST = re.compile(r"[0-9a-f]{64}")
# What `common.sh: find_platform` can say.
_PLATFORM = re.compile(r"(?:x86_64|aarch64)-(?:manylinux_2_[0-9]{1,2}|unknown-linux-musl)")


def file_name(url: str, step: str) -> str:
    """The name under which the file at `url` is kept."""
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not _FILE.fullmatch(name) or len(name) > _LONGEST:
        raise BootstrapError(
            step,
            f"the index offers {mask(url)!r}, and {name!r} is no file name of a package. Look at the index: this may "
            "be an attempt to write elsewhere on this computer.",
        )
    return name


def check_digest(digest: str, step: str) -> None:
    """Refuse what is not a SHA-256 as lower-case digits."""
    if not _DIGEST.fullmatch(digest):
        raise BootstrapError(step, f"the index names the hash {digest[:80]!r}, which is no SHA-256. Look at the index.")


def check_platform(platform: str, host: str, step: str) -> None:
    """Refuse a platform that no host of ours can have."""
    if not _PLATFORM.fullmatch(platform):
        raise BootstrapError(
            step,
            f"{host} says that its platform is {platform[:80]!r}, which is none that we know. Its shell or its "
            "programs may have been tampered with: do not use this host.",
        )


def check_host_path(path: str, host: str, step: str, within: str = "") -> None:
    """Refuse what is not one absolute path; with `within`, what is not a name in that directory."""
    name = path.removeprefix(f"{within}/")
    inside = not within or (path != name and "/" not in name and name not in ("", ".", ".."))
    if not path.startswith("/") or re.search(r"[\x00-\x1f\x7f]", path) or not inside:
        raise BootstrapError(
            step,
            f"{host} names the directory {path[:200]!r}, which is no path that it can have"
            f"{f' within {within}' if within else ''}. Set HOME or SKYWARD_CACHE there to an absolute path without "
            "control characters; if they are, do not use this host.",
        )
