"""The user's own files on their way to a node, as an archive that holds plain files and directories only."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from skyward.api.image import Image
from skyward.errors import BootstrapError, InvalidArgument

__all__ = ["import_paths", "pack", "unpack"]

MAX_BYTES = 1 << 30
MAX_FILES = 100_000
MAX_DEPTH = 60

# fmt: off
_NOISE = (
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "*.pyc", ".cache", ".hypothesis", ".ipynb_checkpoints",
    ".mypy_cache", ".nox", ".pytest_cache", ".ruff_cache", ".tox", "node_modules", ".DS_Store",
)
_SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_*", ".netrc", ".npmrc", ".pypirc", ".pgpass",
    ".aws", ".azure", ".docker", ".gcloud", "*.config/gcloud", ".gnupg", ".kube", ".oci", ".ssh",
)
# fmt: on
_LOOKS_SECRET = re.compile(r"secret|credential|passw|(?:^|[._-])tokens?(?:[._-]|$)", re.IGNORECASE)

_log = logging.getLogger("skyward.includes")


def import_paths(image: Image, root: Path) -> tuple[str, ...]:
    """Where the image's includes are imported from, relative to the directory that they are unpacked into."""
    if not image.includes:
        return ()
    paths = ["."]
    for include in map(posixpath.normpath, image.includes):
        paths.append(posixpath.dirname(include) or ".")
        if _holds_modules(root / include, include, image.excludes):
            paths.append(include)
    return tuple(dict.fromkeys(paths))


def pack(image: Image, root: Path, archive: IO[bytes]) -> None:
    """Write the image's includes, less what is excluded, into `archive`, under names relative to `root`."""
    root = root.resolve()
    seen: set[str] = set()
    size = 0
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for include in image.includes:
            name = posixpath.normpath(include)
            _check_named(root, name, image.excludes)
            for path, inner in _walk(root, root / name, "" if name == "." else name, image.excludes, frozenset()):
                if inner not in seen:
                    seen.add(inner)
                    size += _add(tar, path, inner)
                if size > MAX_BYTES or len(seen) > MAX_FILES:
                    raise InvalidArgument(
                        f"includes={list(image.includes)!r} hold more than {MAX_BYTES >> 20} MB or {MAX_FILES:,} files "
                        f"(reached at {inner!r}); they are for code. Leave data out with excludes=[...], and put it "
                        "where the nodes can read it."
                    )
    if suspects := sorted(name for name in seen if _LOOKS_SECRET.search(Path(name).name) and not name.endswith(".py")):
        _log.warning("includes send files that look like secrets (leave them out with excludes=): %s", suspects)


def unpack(archive: IO[bytes], dest: Path) -> None:
    """Fill the new directory `dest` from an archive that is not trusted; a half-filled one is never seen."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            members = list(_checked(tar))
            archive.seek(tar.offset)
            if archive.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes a cut for the end
                raise tarfile.TarError("the archive is cut off")
            if hasattr(tarfile, "data_filter"):
                tar.extractall(fresh, members, filter="data")
            else:  # before 3.11.4; `_checked` lets nothing else through
                tar.extractall(fresh, members)
        fresh.rename(dest)
    except (OSError, tarfile.TarError) as exc:
        raise BootstrapError("unpacking includes", f"{exc}. The directory {dest} must be new or empty.") from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _holds_modules(directory: Path, name: str, excludes: Sequence[str]) -> bool:
    """Whether modules lie in it that it is not the package of."""
    if not directory.is_dir() or (directory / "__init__.py").exists():
        return False
    sent = (
        child for child in directory.iterdir() if not _excluded(f"{name}/{child.name}".removeprefix("./"), excludes)
    )
    return any(child.suffix == ".py" or (child / "__init__.py").exists() for child in sent)


def _check_named(root: Path, name: str, excludes: Sequence[str]) -> None:
    if not os.path.lexists(root / name):
        parent = (root / name).parent
        around = [path.name for path in parent.iterdir()] if parent.is_dir() else []
        near = get_close_matches(Path(name).name, around, n=5, cutoff=0.5)
        raise InvalidArgument(
            f"includes holds {name!r}, which does not exist in {root}"
            f"{'; near ones: ' + ', '.join(near) if near else ''}. "
            "Give paths relative to the directory in which you start the script."
        )
    if pattern := _excluded(name, excludes):
        raise InvalidArgument(
            f"includes holds {name!r}, but what matches {pattern!r} is left out, so nothing would be sent. "
            "Take it out of includes or excludes; secrets go into Image(env=...)."
        )


def _excluded(name: str, excludes: Sequence[str]) -> str | None:
    """The pattern because of which `name` is left out."""
    patterns = [*(pattern.rstrip("/") for pattern in excludes), *_NOISE]
    # A module named id_map.py is no key.
    patterns += () if name.endswith(".py") else _SECRETS
    parts = name.split("/")
    for pattern in patterns:
        if fnmatchcase(name, pattern) or any(fnmatchcase(part, pattern) for part in parts):
            return pattern
    return None


def _walk(
    root: Path, path: Path, name: str, excludes: Sequence[str], above: frozenset[Path]
) -> Iterator[tuple[Path, str]]:
    if _excluded(name, excludes):
        return
    real = path.resolve()
    if not real.is_relative_to(root):
        raise InvalidArgument(
            f"{name!r} is a link to {real}, which lies outside the project {root}; only what lies in it is sent. "
            "Copy it into the project, or name it in excludes."
        )
    # A link may not lead to what would be left out under its own name.
    if _excluded(real.relative_to(root).as_posix(), excludes):
        return
    mode = real.stat().st_mode if real.exists() else 0
    if stat.S_ISREG(mode):
        yield real, name
    elif not stat.S_ISDIR(mode) or real in above or len(above) > MAX_DEPTH:
        kind = "lies too deep or in a circle of links" if stat.S_ISDIR(mode) else "is neither file nor directory"
        raise InvalidArgument(f"{name[:200]!r} in includes {kind} and cannot be sent. Name it in excludes.")
    elif not (real / "pyvenv.cfg").exists():
        if name:
            yield real, name
        for child in sorted(os.listdir(real)):
            yield from _walk(root, path / child, f"{name}/{child}" if name else child, excludes, above | {real})


def _add(tar: tarfile.TarFile, path: Path, name: str) -> int:
    """Put a file or directory into the archive; gives its size."""
    member = tarfile.TarInfo(name)
    if path.is_dir():
        member.type, member.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(member)
        return 0
    # Neither a link nor a pipe that took the file's place since it was looked at is followed.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{name!r} in includes changed while it was read. Try again.")
        member.size, member.mtime = found.st_size, int(found.st_mtime)
        member.mode = 0o700 if found.st_mode & stat.S_IXUSR else 0o600
        tar.addfile(member, file)
        return member.size


def _checked(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    size = 0
    for count, member in enumerate(tar):
        size += member.size
        if not (member.isreg() or member.isdir()) or member.name.startswith("/") or ".." in member.name.split("/"):
            raise tarfile.TarError(f"the archive holds {member.name!r}, which is no plain file or leads elsewhere")
        if size > MAX_BYTES or count > MAX_FILES:
            raise tarfile.TarError(f"the archive holds more than {MAX_BYTES >> 20} MB or {MAX_FILES:,} files")
        if member.name.count("/") > 2 * MAX_DEPTH:  # what could be made, but not removed again
            raise tarfile.TarError(f"the archive holds {member.name[:80]!r}..., which lies too deep")
        # As `pack` has written them; the archive of somebody else may say otherwise.
        member.mode = 0o700 if member.isdir() or member.mode & stat.S_IXUSR else 0o600
        member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
        yield member
