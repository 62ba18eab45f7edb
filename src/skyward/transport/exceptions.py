"""How an exception crosses from a node to the client: same type, its chain, and the remote traceback as a note.

The node tests whether the exception survives; one that does not becomes a RemoteError. It is rebuilt in the thread that
asks for it, since user code runs then.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import re
import selectors
import stat
import sysconfig
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from skyward.api.secret import any_hidden, hide, hide_bytes
from skyward.errors import REMOTE, RemoteError, SkywardError
from skyward.transport.codec import Described
from skyward.transport.payload import Pickler, unpack

__all__ = [
    "PackedError",
    "annotate",
    "as_text",
    "capture",
    "frames_of",
    "original",
    "packed",
    "rebuild",
    "rebuilding",
    "users_part",
    "with_frames",
]

Advice = Callable[[BaseException], str]

_MAX_PICKLE = 1 << 20
_MAX_TEXT = 256 << 10
_MAX_CHAIN = 16
_MAX_NOTES, _MAX_NOTE = 16, 4 << 10
_MAX_SOURCE = 2 << 20
_MAX_FILLED = 100
_MAX_FRAMES = 20
_MAX_STACK = 8 << 10
_MAX_ARGUMENT = 16 << 10
_CUT = re.compile(r"\.\.\. (\d[\d,]{0,20}) characters left out \.\.\.\n")
_CUT_ROOM = 64
_FRAME = re.compile(r'  File "(.+)", line (\d{1,9})\b')
_OURS = (str(Path(__file__).parents[1]) + os.sep, os.path.join(sysconfig.get_path("stdlib"), "asyncio") + os.sep)


class PackedError(Exception):
    """`rebuilt` gets the notes that were added before."""

    def __init__(
        self, rebuild: Callable[[Sequence[str]], BaseException], summary: str = "", traceback: str = ""
    ) -> None:
        super().__init__(summary)
        self.traceback = traceback
        self._rebuild = rebuild
        self._rebuilding = threading.RLock()  # of one thread twice: its code may ask for the same exception
        self._error: BaseException | None = None

    def rebuilt(self) -> BaseException:
        """The same object every time."""
        with self._rebuilding:
            if self._error is None:
                self._error = self._rebuild(tuple(getattr(self, "__notes__", ())))
            return self._error


E = TypeVar("E", bound="BaseException | None")


def original(error: E) -> E | BaseException:
    """User code runs, so no lock may be held."""
    return error.rebuilt() if isinstance(error, PackedError) else error


@contextmanager
def rebuilding() -> Generator[None]:
    try:
        yield
    except PackedError as exc:
        raise exc.rebuilt() from None


def capture(exc: BaseException) -> tuple[Described, bytes]:
    """Text (as JSON) and a pickle of the chain (empty where it cannot travel)."""
    data = _pickled(exc)
    told = traceback.TracebackException(type(exc), exc, users_part(exc.__traceback__))
    if isinstance(exc, SkywardError) and all(frame.filename.startswith(_OURS) for frame in told.stack):
        told.stack.clear()  # what we say after the body has ended, such as of its result: no line of it is the user's
        told.__cause__ = told.__context__ = None
    _hide_ours(told)
    if data:
        told.__notes__ = None  # they travel with the exception, and are shown below it
    described: Described = {
        "type": _type_name(exc),
        "message": _tail(_str(exc), _MAX_TEXT),
        "traceback": _tail("".join(told.format()), _MAX_TEXT),
    }
    if data and (notes := _notes(exc)):
        described["notes"] = notes  # should its class not exist at home
    return described, data


def _notes(exc: BaseException) -> list[str]:
    notes = getattr(exc, "__notes__", None)
    if not isinstance(notes, list):
        return []
    texts = [note for note in cast("list[object]", notes) if isinstance(note, str)]
    return [_tail(note, _MAX_NOTE) for note in texts[:_MAX_NOTES]]


def rebuild(described: Described, data: bytes | memoryview) -> BaseException:
    error: BaseException | None = None
    if len(data):
        try:
            error = _without_secrets(_chained(unpack(data, [], keep_classes=True)))
        except BaseException as exc:  # a class that only exists there, or does harm: the text says all that is known
            described = {**described, "message": f"{described['message']} (its class could not be rebuilt here: {exc})"}
    if error is None:
        error = RemoteError(described["type"], hide(described["message"]), hide(described["traceback"]))
    if not getattr(error, "__notes__", None):  # its class was not there, or its __reduce__ forgets them
        for note in described.get("notes", ()):
            noted(error, hide(note))
    return error


def annotate(exc: BaseException, described: Described, where: str) -> BaseException:
    note = f"{where}\n\n{REMOTE}\n{hide(_with_source(described['traceback'])).rstrip()}"
    return exc if noted(exc, note) else RemoteError(described["type"], hide(described["message"]), note)


def noted(exc: BaseException, note: str) -> bool:
    try:
        exc.add_note(note)
    except Exception:  # its __notes__ is not a list, or it does not let itself be changed
        try:
            object.__setattr__(exc, "__notes__", [note])
        except (AttributeError, TypeError):
            return False
    return True


def set_partial(error: BaseException, results: Mapping[int, Any]) -> None:
    try:
        error.partial = dict(results)  # type: ignore[attr-defined]
    except Exception:  # one that forbids it, such as a frozen dataclass
        pass


def packed(
    described: Described, data: bytes | memoryview, where: str = "", advice: Advice | None = None
) -> PackedError:
    message, lines = (_tail(text, _MAX_TEXT) for text in (described["message"], described["traceback"]))
    described = {**described, "message": message, "traceback": lines}  # nodes keep to it, if they are ours
    kept = bytes(data)  # a copy: the frame that it came in need not be kept for it

    def build(notes: Sequence[str]) -> BaseException:
        error = rebuild(described, kept)
        if where:
            error = annotate(error, described, where)
        for note in ((advice(error) if advice is not None else ""), *notes):
            if note:
                noted(error, note)
        return error

    return PackedError(build, f"{described['type']}: {hide(str(described['message']))}", described["traceback"])


def as_text(error: BaseException, limit: int = 16 << 10) -> str:
    if isinstance(error, PackedError):
        return hide(_tail(error.traceback.rstrip() or str(error), limit))
    return f"{type(error).__name__}: {_tail(_str(error), limit)}"


def frames_of(exc: BaseException) -> str:
    told = traceback.StackSummary.from_list(
        [
            frame
            for frame in traceback.extract_tb(exc.__traceback__)
            if not frame.filename.startswith(_OURS) and frame.filename != selectors.__file__  # where a loop waits
        ][-_MAX_FRAMES:]
    )
    return _tail("".join(told.format()).rstrip(), _MAX_STACK)


def with_frames(exc: BaseException, where: str, frames: str) -> None:
    noted(exc, f"{where}\n{hide(_tail(frames, _MAX_STACK))}")


def _pickled(exc: BaseException) -> bytes:
    able = [(_portable(e), kind, suppress) for e, kind, suppress in _links(exc)]
    return b"" if able[0][0] is None else _dumps([(e or _as_text(exc), kind, suppress) for e, kind, suppress in able])


@dataclass(frozen=True)
class _Parts:
    """For exceptions that Python cannot pickle, most often because of their __init__."""

    cls: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def join(self) -> BaseException:
        try:
            made = self.cls.__new__(self.cls, *self.args)
            if self.cls.__module__ == "builtins":
                made.__init__(*self.args)  # what it says is made of more than its args
        except TypeError:
            made = BaseException.__new__(self.cls)
        cast(Any, BaseException.args).__set__(made, self.args)
        made.__dict__.update(self.state)
        return made


def _portable(exc: BaseException) -> BaseException | _Parts | None:
    """It, or its parts without attributes that cannot travel, or None. Large arguments are cut."""
    if _travels(exc):
        return exc
    try:
        state = {k: v for k, v in vars(exc).items() if _travels(v)}
        parts = _Parts(type(exc), exc.args, state)
        data = _dumps(parts)
        if len(data) > _MAX_PICKLE and not hasattr(exc, "exceptions"):  # a group is made of its parts
            parts = _Parts(type(exc), tuple(map(_shortened, exc.args)), state)
            data = _dumps(parts)
        return parts if len(data) <= _MAX_PICKLE and type(pickle.loads(data).join()) is type(exc) else None
    except BaseException:  # as in _travels
        return None


def _shortened(value: object) -> object:
    if isinstance(value, str):
        return _tail(value, _MAX_ARGUMENT)
    if isinstance(value, bytes):
        return value[:_MAX_ARGUMENT]  # of a UnicodeDecodeError, which names places in it
    if len(_dumps(value)) <= _MAX_ARGUMENT:
        return value
    return f"<{type(value).__name__}, left out since it is too large for an exception>"


def _dumps(value: object) -> bytes:
    out = io.BytesIO()
    cast(Any, _ExceptionPickler(out)).dump(value)
    return out.getvalue()


class _ExceptionPickler(Pickler):
    """Pickles exceptions as Python does: some packages register a reducer that loses arguments."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return obj.__reduce_ex__(5)
        return cast(Any, super()).reducer_override(obj)


def _travels(value: object) -> bool:
    try:
        data = _dumps(value)
        return len(data) <= _MAX_PICKLE and type(pickle.loads(data)) is type(value)
    except BaseException:  # whatever a __reduce__ of the user's raises; the text travels instead
        return False


def _as_text(exc: BaseException) -> RemoteError:
    text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__, chain=False))
    return RemoteError(_type_name(exc), _tail(_str(exc), _MAX_TEXT), _tail(text, _MAX_TEXT))


def _type_name(exc: BaseException) -> str:
    return f"{type(exc).__module__}.{type(exc).__qualname__}".removeprefix("builtins.")


def _links(exc: BaseException) -> list[tuple[BaseException, str, bool]]:
    links: list[tuple[BaseException, str, bool]] = []
    current: BaseException | None = exc
    seen: set[int] = set()
    while current is not None and id(current) not in seen and len(links) < _MAX_CHAIN:
        seen.add(id(current))
        kind = "cause" if current.__cause__ is not None else "context"
        links.append((current, kind, current.__suppress_context__))
        current = current.__cause__ if current.__cause__ is not None else current.__context__
    return links


def _chained(links: list[tuple[BaseException | _Parts, str, bool]]) -> BaseException:
    inner: BaseException | None = None
    for link_or_parts, kind, suppress in reversed(links):
        exc = link_or_parts.join() if isinstance(link_or_parts, _Parts) else link_or_parts
        # through the slots of the base class: the user's may forbid assignment (a frozen dataclass)
        link = BaseException.__cause__ if kind == "cause" else BaseException.__context__
        cast(Any, link).__set__(exc, inner)
        cast(Any, BaseException.__suppress_context__).__set__(exc, suppress)
        inner = exc
    assert inner is not None
    return inner


def _without_secrets(exc: BaseException) -> BaseException:
    if any_hidden():
        for link, _, _ in _links(exc):
            cast(Any, BaseException.args).__set__(link, tuple(_masked(value) for value in link.args))
            for name, value in vars(link).items():
                vars(link)[name] = _masked(value)
    return exc


def _masked(value: Any) -> Any:
    if isinstance(value, BaseException):
        return _without_secrets(value)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_masked(item) for item in value)
    if type(value) is dict:
        return {_masked(key): _masked(item) for key, item in cast("dict[Any, Any]", value).items()}
    if type(value) is bytes:
        return hide_bytes(value)
    return hide(value) if type(value) is str else value


def users_part(tb: TracebackType | None) -> TracebackType | None:
    left = tb
    while left is not None and left.tb_frame.f_code.co_filename.startswith(_OURS):
        left = left.tb_next
    return left or tb


def _hide_ours(told: traceback.TracebackException) -> None:
    links: list[traceback.TracebackException | None] = [told]
    seen: set[int] = set()
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            if kept := [frame for frame in link.stack if not frame.filename.startswith(_OURS[0])]:
                link.stack[:] = kept
            links += [link.__cause__, link.__context__]


def _with_source(text: str) -> str:
    lines = text.splitlines()
    filled: list[str] = []
    left = _MAX_FILLED
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        filled.append(line)
        frame = _FRAME.match(line)
        if frame and left and not following.startswith("    "):
            left -= 1
            if source := _source(frame[1], int(frame[2])):
                filled.append(f"    {source}")
    return "\n".join(filled)


def _source(path: str, number: int) -> str:
    known = path in linecache.cache  # which has the cells of a notebook
    if not known:
        try:
            about = os.stat(path)
        except (OSError, ValueError):
            return ""
        if not path.endswith(".py") or not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_SOURCE:
            return ""
    line = linecache.getline(path, number).strip()
    if not known:
        linecache.cache.pop(path, None)  # a node can name every file that there is: they are not kept
    return line


def _str(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as broken:  # a __str__ of the user's that raises must not hide the failure itself
        return f"<no message: its __str__ raised {broken!r}>"


def _tail(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    cut = _CUT.match(text)
    end = text[-max(0, limit - _CUT_ROOM) :]
    left = len(text) - len(end) + (int(cut[1].replace(",", "")) - cut.end() if cut else 0)
    return f"... {left:,} characters left out ...\n{end}"
