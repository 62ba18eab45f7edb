"""Files of package indexes, fetched onto this computer for hosts that cannot reach the indexes themselves."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import ssl
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.error import URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from skyward.api.image import mask
from skyward.errors import BootstrapError
from skyward.setup.env.foreign_names import file_name

__all__ = ["fetch", "logins"]

_STEP = "fetching packages"
_TRIES = 3
_SILENCE = 30.0


def fetch(
    url: str, digest: str, directory: Path, known: Mapping[str, str], certificates: str | None, deadline: float
) -> Path:
    """The file at `url`, which must have that SHA-256, kept in `directory` under its own name."""
    kept = directory / file_name(url, _STEP)
    if kept.exists():
        return kept
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    request = Request(url)
    if login := known.get(urlsplit(url).netloc):
        # Not sent on to where the server may point us.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(unquote(login).encode()).decode()}")
    context = ssl.create_default_context(cafile=certificates)
    for attempt in range(_TRIES):
        try:
            with tempfile.NamedTemporaryFile(dir=directory, delete=False) as part:
                try:
                    found = _copy(request, part.file.fileno(), context, deadline)
                    if found != digest:
                        raise BootstrapError(
                            _STEP, f"{mask(url)} has the hash {found}, not {digest}. Look at the index."
                        )
                    os.rename(part.name, kept)
                    return kept
                except BaseException:
                    os.unlink(part.name)
                    raise
        except (URLError, OSError) as exc:
            if attempt + 1 == _TRIES or time.monotonic() > deadline:
                raise BootstrapError(_STEP, f"{mask(url)} could not be fetched: {exc}. Look at your network.") from exc
            time.sleep(2**attempt)
    raise AssertionError


def logins(texts: Iterable[str]) -> dict[str, str]:
    """The user names and passwords in addresses, by the server that they are for."""
    return {server: login for text in texts for login, server in re.findall(r"://([^/\s?#]+)@([^/@\s]+)", text)}


def _copy(request: Request, file: int, context: ssl.SSLContext, deadline: float) -> str:
    """Writes what the server sends into `file`; gives its hash."""
    state = hashlib.sha256()
    with urlopen(request, timeout=_SILENCE, context=context) as answer:
        while piece := answer.read(1 << 20):
            if time.monotonic() > deadline:
                raise TimeoutError("the time is over")
            state.update(piece)
            os.write(file, piece)
    return state.hexdigest()
