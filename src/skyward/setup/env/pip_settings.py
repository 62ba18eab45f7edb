"""The user's settings of pip, in the words of uv, which does not read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["no_index", "uv_environment"]

# pip's setting, uv's variable, and the older variables of uv that have the same meaning.
_VARIABLES = (
    ("index-url", "UV_DEFAULT_INDEX", ("UV_INDEX_URL",)),
    ("extra-index-url", "UV_INDEX", ("UV_EXTRA_INDEX_URL",)),
    ("find-links", "UV_FIND_LINKS", ()),
    ("constraint", "UV_CONSTRAINT", ()),
    ("trusted-host", "UV_INSECURE_HOST", ()),
    ("timeout", "UV_HTTP_TIMEOUT", ("UV_REQUEST_TIMEOUT",)),
    ("cert", "SSL_CERT_FILE", ()),
)


def uv_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make uv look where the user's pip looks; what is set for uv already stays as it is."""
    settings = _settings(environ)
    variables: dict[str, str] = {}
    for name, variable, older in _VARIABLES:
        if name not in settings or any(known in environ for known in (variable, *older)):
            continue
        words = settings[name].split()
        if name == "timeout" and not settings[name].isdigit():
            continue  # uv takes whole seconds only
        variables[variable] = (",".join if variable == "UV_FIND_LINKS" else " ".join)(words)
    if "UV_INDEX" in variables and "UV_INDEX_STRATEGY" not in environ:
        # pip takes the best version of all indexes; uv alone would stop at the first index that knows the name.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables


def no_index(environ: Mapping[str, str]) -> bool:
    """Whether the user's pip looks into no index at all; uv has no variable for it."""
    return _settings(environ).get("no-index", "").lower() in ("1", "true", "yes", "on")


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    from configparser import Error, RawConfigParser  # only where packages are installed

    settings: dict[str, str] = {}
    for path in _files(environ):
        parser = RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (Error, OSError, UnicodeDecodeError):
            continue  # pip itself complains about such a file; it is not ours to mend
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= {key.replace("_", "-"): value for key, value in parser.items(section) if value}
    if "PIP_DEFAULT_TIMEOUT" in environ:
        settings["timeout"] = environ["PIP_DEFAULT_TIMEOUT"]
    for name in ("no-index", *(name for name, _, _ in _VARIABLES)):
        if value := environ.get(f"PIP_{name.upper().replace('-', '_')}"):
            settings[name] = value
    return settings


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """pip's files, those that win last."""
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    home = Path.home()
    for directory in reversed(environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(directory) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    if sys.platform == "darwin":
        yield home / "Library" / "Application Support" / "pip" / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)
