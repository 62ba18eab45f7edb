"""The user's own files for a node, as an archive of plain files and directories."""

from __future__ import annotations

import io
import logging
import os
import posixpath
import re
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from skyward.api.image import Image
from skyward.api.secret import looks_secret_file
from skyward.errors import BootstrapError, InvalidArgument

__all__ = ["SCANNED", "found_in", "found_in_name", "import_paths", "pack", "unpack"]


MAX_BYTES = 1 << 30
MAX_FILES = 100_000
MAX_DEPTH = 60

# fmt: off
_NOISE = (
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "*.pyc", ".cache", ".hypothesis", ".ipynb_checkpoints",
    ".mypy_cache", ".nox", ".pytest_cache", ".ruff_cache", ".tox", "node_modules", ".DS_Store",
)
# fmt: on
_MOST_SCANNED = 64 << 20  # bytes of small files that are looked into; a project of code has a few millions
_MOST_NAMED = 20

_log = logging.getLogger("skyward.includes")


def import_paths(image: Image, root: Path) -> tuple[str, ...]:
    if not image.includes:
        return ()
    paths = ["."]
    for include in map(posixpath.normpath, image.includes):
        paths.append(posixpath.dirname(include) or ".")
        if _holds_modules(root / include, include, image.excludes):
            paths.append(include)
    return tuple(dict.fromkeys(paths))


def pack(image: Image, root: Path, archive: IO[bytes]) -> None:
    root = root.resolve()
    rules = _Rules(image.excludes, image.allow_includes)
    seen: set[str] = set()
    size = 0
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for include in image.includes:
            name = posixpath.normpath(include)
            _check_named(root, name, rules)
            for path, inner in _walk(root, root / name, "" if name == "." else name, rules, frozenset()):
                if inner not in seen:
                    seen.add(inner)
                    size += _add(tar, path, inner, rules)
                if size > MAX_BYTES or len(seen) > MAX_FILES:
                    raise InvalidArgument(
                        f"includes={list(image.includes)!r} hold more than {MAX_BYTES >> 20} MB or {MAX_FILES:,} files "
                        f"(reached at {inner!r}); they are for code. Leave data out with excludes=[...], and send "
                        "it with pool.push(local, remote)."
                    )
    rules.warn()


def unpack(archive: IO[bytes], dest: Path) -> None:
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
    except (OSError, ValueError, tarfile.TarError) as exc:
        raise BootstrapError("unpacking includes", f"{exc}. The directory {dest} must be new or empty.") from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class _Rules:
    def __init__(self, excludes: Sequence[str], allowed: Sequence[str] = ()) -> None:
        self._patterns = [*(pattern.rstrip("/") for pattern in excludes), *_NOISE]
        self._allowed = [pattern.rstrip("/") for pattern in allowed]
        self._left_out: dict[str, str] = {}
        self._sent: dict[str, str] = {}
        self._scanned = 0

    def excluded(self, name: str) -> str | None:
        return _matching(name, self._patterns)

    def credential(self, name: str) -> str | None:
        if name.endswith(".py") or self._allows(name):  # a module named id_map.py is no key
            return None
        return found_in_name(name)

    def leaves_out(self, name: str) -> bool:
        if self.excluded(name):
            return True
        if reason := self.credential(name):
            self._left_out[name] = reason
        return reason is not None

    def withholds(self, name: str, data: bytes) -> bool:
        """Because of its text. A module is sent, or imports would fail."""
        if self._scanned > _MOST_SCANNED or self._allows(name):
            return False
        self._scanned += len(data)
        reason = found_in(data)
        if reason is not None:
            (self._sent if name.endswith(".py") else self._left_out)[name] = reason
        return reason is not None and not name.endswith(".py")

    def warn(self) -> None:
        if self._left_out:
            _log.warning(
                "includes leave out what looks like credentials: %s. Nodes do not get it. If they need a value, give "
                "it to them as a secret: sky.Image(env={...: sky.Secret(...)}). To send a file anyway, name it: "
                "sky.Image(allow_includes=[%r]). To leave it out without this warning: excludes=[...].",
                _listed(self._left_out),
                next(iter(self._left_out)),
            )
        if self._sent:
            _log.warning(
                "includes send modules that seem to hold credentials: %s. Take them out of the code, and give them to "
                "the nodes as secrets: sky.Image(env={...: sky.Secret(...)}). If they hold none, name the modules: "
                "sky.Image(allow_includes=[%r]).",
                _listed(self._sent),
                next(iter(self._sent)),
            )

    def _allows(self, name: str) -> bool:
        return _matching(name, self._allowed) is not None


def _matching(name: str, patterns: Sequence[str]) -> str | None:
    parts = name.split("/")
    for pattern in patterns:
        if fnmatchcase(name, pattern) or any(fnmatchcase(part, pattern) for part in parts):
            return pattern
    return None


def _listed(found: Mapping[str, str]) -> str:
    more = len(found) - _MOST_NAMED
    names = [f"{name!r} ({reason})" for name, reason in sorted(found.items())[:_MOST_NAMED]]
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _holds_modules(directory: Path, name: str, excludes: Sequence[str]) -> bool:
    if not directory.is_dir() or (directory / "__init__.py").exists():
        return False
    rules = _Rules(excludes)
    sent = (child for child in directory.iterdir() if not rules.excluded(f"{name}/{child.name}".removeprefix("./")))
    return any(child.suffix == ".py" or (child / "__init__.py").exists() for child in sent)


def _check_named(root: Path, name: str, rules: _Rules) -> None:
    if not os.path.lexists(root / name):
        parent = (root / name).parent
        around = [path.name for path in parent.iterdir()] if parent.is_dir() else []
        near = get_close_matches(Path(name).name, around, n=5, cutoff=0.5)
        raise InvalidArgument(
            f"includes holds {name!r}, which does not exist in {root}"
            f"{'; near ones: ' + ', '.join(near) if near else ''}. "
            "Give paths relative to the directory in which you start the script."
        )
    if pattern := rules.excluded(name):
        raise InvalidArgument(
            f"includes holds {name!r}, but what matches {pattern!r} is left out, so nothing would be sent. "
            "Take it out of includes or excludes."
        )
    if reason := rules.credential(name):
        raise InvalidArgument(
            f"includes holds {name!r}, which looks like a credential ({reason}) and would be left out. Give nodes the "
            "value as a secret, Image(env={...: sky.Secret(...)}); or, if the file must be sent, add "
            f"allow_includes=[{name!r}]."
        )


def _walk(root: Path, path: Path, name: str, rules: _Rules, above: frozenset[Path]) -> Iterator[tuple[Path, str]]:
    if rules.leaves_out(name):
        return
    real = path.resolve()
    if not real.is_relative_to(root):
        raise InvalidArgument(
            f"{name!r} is a link to {real}, which is outside the project {root}; only what is in it is sent. "
            "Copy it into the project, or name it in excludes."
        )
    # A link may not lead to what would be left out under its own name.
    if rules.leaves_out(real.relative_to(root).as_posix()):
        return
    mode = real.stat().st_mode if real.exists() else 0
    if stat.S_ISREG(mode):
        yield real, name
    elif not stat.S_ISDIR(mode) or real in above or len(above) > MAX_DEPTH:
        kind = "is nested too deeply or in a loop of links" if stat.S_ISDIR(mode) else "is neither file nor directory"
        raise InvalidArgument(f"{name[:200]!r} in includes {kind} and cannot be sent. Name it in excludes.")
    elif not (real / "pyvenv.cfg").exists():
        if name:
            yield real, name
        for child in sorted(os.listdir(real)):
            yield from _walk(root, path / child, f"{name}/{child}" if name else child, rules, above | {real})


def _add(tar: tarfile.TarFile, path: Path, name: str, rules: _Rules) -> int:
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
        if member.size > SCANNED:
            tar.addfile(member, file)
            return member.size
        data = file.read(SCANNED + 1)
        if len(data) != member.size:
            raise InvalidArgument(f"{name!r} in includes changed while it was read. Try again.")
        if rules.withholds(name, data):
            return 0
        tar.addfile(member, io.BytesIO(data))
        return member.size


def _checked(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    size = 0
    for count, member in enumerate(tar):
        size += member.size
        if not (member.isreg() or member.isdir()) or member.name.startswith("/") or ".." in member.name.split("/"):
            raise tarfile.TarError(f"the archive holds {member.name!r}, which is not a plain file or leads elsewhere")
        if size > MAX_BYTES or count > MAX_FILES:
            raise tarfile.TarError(f"the archive holds more than {MAX_BYTES >> 20} MB or {MAX_FILES:,} files")
        if member.name.count("/") > 2 * MAX_DEPTH:  # what could be made, but not removed again
            raise tarfile.TarError(f"the archive holds {member.name[:80]!r}..., which is nested too deeply")
        # As `pack` has written them; the archive of somebody else may say otherwise.
        member.mode = 0o700 if member.isdir() or member.mode & stat.S_IXUSR else 0o600
        member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
        yield member


# What looks like a credential among the user's files: by the name of a file, and by what a small text holds.
#
# The names are those of programs that keep logins in files; the texts begin as their makers let keys begin, so that
# they can be found. Neither finds everything.


SCANNED = 512 << 10
_TEXT = 8 << 10

# fmt: off
_DIRECTORIES = (
    ".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".kube", ".oci", ".ssh", ".password-store", ".config/gcloud",
)
_FILES = (
    ".env", ".env.*", "*.env", ".envrc", "*.envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf",
    ".mylogin.cnf", ".boto", ".s3cfg", ".git-credentials", ".htpasswd", ".dockercfg", "rclone.conf", ".vault-token",
    ".terraformrc", "*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", "kubeconfig", "kubeconfig.*",
    "*.kubeconfig", "kaggle.json", ".databrickscfg", "gha-creds-*.json", "service-account*.json",
    "service_account*.json", "*serviceaccount*.json",
    "*.pem", "*.key", "*.p12", "*.p8", "*.pfx", "*.jks", "*.keystore", "*.kdb", "*.kdbx", "*.ppk", "*.ovpn", "id_*",
)
# What a credential begins with, and the whole of it. The beginnings are looked for first: that is fast.
_TEXTS: tuple[tuple[str, tuple[bytes, ...], bytes], ...] = (
    ("an access key of AWS", (b"AKIA", b"ASIA"), rb"A[KS]IA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("a secret key of AWS", (b"aws_secret_access_key",), rb"aws_secret_access_key\s*[=:]\s*[\"']?[A-Za-z0-9/+]{40}"),
    ("a token of GitHub", (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
     rb"gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60}"),
    ("a token of GitLab", (b"glpat-",), rb"glpat-[A-Za-z0-9_-]{20}"),
    ("a token of Hugging Face", (b"hf_",), rb"hf_[A-Za-z0-9]{30}"),
    ("a token of Slack", (b"xox", b"hooks.slack.com/services/T"),
     rb"xox[abeoprs]-[0-9]+-[A-Za-z0-9-]{8}|hooks\.slack\.com/services/T[A-Z0-9]+/B[A-Z0-9]+/[A-Za-z0-9]{20}"),
    ("a key of OpenAI or Anthropic", (b"sk-ant-", b"sk-proj-", b"sk-svcacct-", b"T3BlbkFJ"),
     rb"sk-(?:ant|proj|svcacct)-[A-Za-z0-9_-]{40}|sk-[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}"),
    ("a key of Google", (b"AIza", b"GOCSPX-"), rb"AIza[0-9A-Za-z_-]{35}|GOCSPX-[A-Za-z0-9_-]{28}"),
    ("a key of Stripe", (b"sk_live_", b"rk_live_"), rb"[rs]k_live_[A-Za-z0-9]{20}"),
    ("a key of SendGrid", (b"SG.",), rb"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
    ("a token of npm", (b"npm_", b"_authToken="), rb"npm_[A-Za-z0-9]{36}|_authToken=[A-Za-z0-9_-]{20}"),
    ("a token of PyPI", (b"pypi-AgE",), rb"pypi-AgE[A-Za-z0-9_-]{50}"),
    ("a key of Azure", (b"AccountKey=",), rb"AccountKey=[A-Za-z0-9+/]{80}"),
    ("a token of DigitalOcean", (b"dop_v1_",), rb"dop_v1_[a-f0-9]{64}"),
    ("a token of Databricks", (b"dapi",), rb"dapi[a-f0-9]{32}"),
    ("a token of Vault", (b"hvs.",), rb"hvs\.[A-Za-z0-9_-]{24}"),
    ("a private key", (b"PRIVATE KEY", b"AGE-SECRET-KEY-1"),
     rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\[rn])*[A-Za-z0-9+/=:,\s\\-]{64}"
     rb"|AGE-SECRET-KEY-1[A-Z0-9]{58}"),
)
# fmt: on
_WHOLE = [(what, beginnings, re.compile(rb"(?<![A-Za-z0-9])(?:" + text + rb")")) for what, beginnings, text in _TEXTS]
_EXAMPLE = re.compile(rb"EXAMPLE|(.)\1{9}|1234567890", re.IGNORECASE)


def found_in_name(name: str) -> str | None:
    lower = name.lower()
    parts = lower.split("/")
    for pattern in _DIRECTORIES:
        if f"/{pattern}/" in f"/{lower}/":
            return pattern
    for pattern in _FILES:
        if fnmatchcase(parts[-1], pattern):
            return pattern
    return "its name" if looks_secret_file(name.rpartition("/")[2]) else None


def found_in(data: bytes) -> str | None:
    if len(data) > SCANNED or b"\0" in data[:_TEXT]:
        return None
    return next(_credentials(data), None)


def _credentials(data: bytes) -> Iterator[str]:
    for what, beginnings, whole in _WHOLE:
        if any(beginning in data for beginning in beginnings):
            for match in whole.finditer(data):
                if not _EXAMPLE.search(match[0]):
                    yield what
