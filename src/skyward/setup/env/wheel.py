"""A wheel of Skyward itself, built from the imported files."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["build_wheel", "source_hash", "stub_wheel", "tree_hash"]

# For a checkout that is on the import path without being installed; a test compares them with pyproject.toml.
REQUIRES = (
    "cloudpickle>=3.1,<3.2",
    "rich>=13",
    "cryptography>=42",
    "packaging>=23.2",
    "uv>=0.12.12",
    "xxhash>=3.2",
    "argcomplete>=3.5",
)

_PACKAGE = Path(__file__).resolve().parents[2]
_WHEEL = "Wheel-Version: 1.0\nGenerator: skyward\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_SKIPPED = {"__pycache__", "build", "dist", "node_modules"}


def build_wheel(dest: Path) -> Path:
    """Reproducible: the same files give the same bytes."""
    version, about = _about()
    info = f"skyward-{version}.dist-info"
    files = {f"skyward/{path.relative_to(_PACKAGE).as_posix()}": path.read_bytes() for path in _files(_PACKAGE)}
    files |= {f"{info}/{name}": text.encode() for name, text in about.items()}
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = dest / f"skyward-{version}-py3-none-any.whl"
    import zipfile  # not for a pool that needs no wheel

    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name)  # dated 1980
            member.external_attr = 0o100644 << 16
            archive.writestr(member, content)
    return wheel


def stub_wheel(dest: Path, name: str) -> Path:
    wheel, info = dest / f"{name.replace('-', '_')}-0-py3-none-any.whl", f"{name.replace('-', '_')}-0.dist-info"
    import zipfile

    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        archive.writestr(f"{info}/WHEEL", _WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def source_hash() -> str:
    return hashlib.sha256(f"{tree_hash(_PACKAGE)} {_about()}".encode()).hexdigest()


def tree_hash(path: Path) -> str:
    state = hashlib.sha256()
    for file in _files(path) if path.is_dir() else [path]:
        content = file.read_bytes()
        state.update(f"{file.relative_to(path).as_posix()!r} {len(content)} ".encode())
        state.update(content)
    return state.hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        hidden = any(part.startswith(".") or part in _SKIPPED or part.endswith(".egg-info") for part in parts)
        if path.is_file() and path.suffix != ".pyc" and not hidden:
            yield path


def _about() -> tuple[str, dict[str, str]]:
    from importlib import metadata

    from skyward import __version__

    try:
        installed = metadata.distribution("skyward")
    except metadata.PackageNotFoundError:
        requires, scripts = list(REQUIRES), None
    else:
        requires, scripts = installed.requires or [], installed.read_text("entry_points.txt")
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires if "extra ==" not in line)
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: skyward\nVersion: {__version__}\nRequires-Python: >=3.11\n{needs}",
        "WHEEL": _WHEEL,
    }
    return __version__, about | ({"entry_points.txt": scripts} if scripts else {})


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
