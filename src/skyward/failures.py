"""How an exception crosses from a node to the client: same type, its chain, and the remote traceback as a note.

It is tried on the node whether the exception survives the journey; one that does not becomes a RemoteError with text.
"""

from __future__ import annotations

import pickle
import traceback
from types import TracebackType
from typing import Any

import cloudpickle

from skyward.errors import RemoteError

__all__ = ["annotate", "capture", "rebuild"]

_MAX_PICKLE = 1 << 20
_MAX_TEXT = 256 << 10
_MAX_CHAIN = 16


def capture(exc: BaseException, skip: str = "") -> tuple[dict[str, Any], bytes]:
    """Text (as JSON) and a pickle of the chain (empty where it cannot travel); frames of file `skip` are left out."""
    text = "".join(traceback.format_exception(type(exc), exc, _without(exc.__traceback__, skip)))
    about = {
        "type": f"{type(exc).__module__}.{type(exc).__qualname__}".removeprefix("builtins."),
        "message": _tail(_str(exc), _MAX_TEXT),
        "traceback": _tail(text, _MAX_TEXT),
    }
    return about, _pickled(exc)


def rebuild(about: dict[str, Any], data: bytes | memoryview) -> BaseException:
    """The exception again, or a RemoteError that says what it was."""
    if len(data):
        try:
            links = pickle.loads(data)
            return _chained(links)
        except Exception as exc:  # a class that only exists there: the text below says all that is known
            about = {**about, "message": f"{about['message']} (its class could not be rebuilt here: {exc})"}
    return RemoteError(about["type"], about["message"], about["traceback"])


def annotate(exc: BaseException, about: dict[str, Any], where: str) -> BaseException:
    """Adds the note that says where it happened, with the remote traceback."""
    exc.add_note(f"{where}\n\nremote traceback:\n{about['traceback'].rstrip()}")
    return exc


def _pickled(exc: BaseException) -> bytes:
    try:
        links = _links(exc)
        data = cloudpickle.dumps(links, protocol=5)
        if len(data) > _MAX_PICKLE:
            return b""
        again = pickle.loads(data)
        same = all(type(a[0]) is type(b[0]) for a, b in zip(links, again, strict=True))
    except Exception:  # it cannot travel as an object; capture() has its text
        return b""
    return data if same else b""


def _links(exc: BaseException) -> list[tuple[BaseException, str, bool]]:
    """The chain, outermost first: each exception, how the next one hangs on it, and __suppress_context__."""
    links: list[tuple[BaseException, str, bool]] = []
    current: BaseException | None = exc
    seen: set[int] = set()
    while current is not None and id(current) not in seen and len(links) < _MAX_CHAIN:
        seen.add(id(current))
        kind = "cause" if current.__cause__ is not None else "context"
        links.append((current, kind, current.__suppress_context__))
        current = current.__cause__ if current.__cause__ is not None else current.__context__
    return links


def _chained(links: list[tuple[BaseException, str, bool]]) -> BaseException:
    inner: BaseException | None = None
    for exc, kind, suppress in reversed(links):
        if kind == "cause":
            exc.__cause__ = inner
        else:
            exc.__context__ = inner
        exc.__suppress_context__ = suppress
        inner = exc
    assert inner is not None
    return inner


def _without(tb: TracebackType | None, skip: str) -> TracebackType | None:
    while skip and tb is not None and tb.tb_frame.f_code.co_filename == skip:
        tb = tb.tb_next
    return tb


def _str(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as broken:  # a __str__ of the user's that raises must not hide the failure itself
        return f"<no message: its __str__ raised {broken!r}>"


def _tail(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"... {len(text) - limit} characters left out ...\n{text[-limit:]}"
