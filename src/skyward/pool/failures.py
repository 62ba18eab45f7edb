"""Keeps failed calls, so that they can be run again here.

engine: a call has failed --(lock)--> a list --twice a second, in the history's thread--> files beside the history
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyward.api.context import PoolContext
from skyward.api.image import Image, PipIndex, mask
from skyward.api.plugin import Plugin
from skyward.api.secret import holds_secret, without_secrets
from skyward.client.call import Call, new_id
from skyward.errors import PluginError
from skyward.events import EndOfCall
from skyward.history.failed_calls import FailedCall, KeptCalls, PoolOfCalls
from skyward.history.recorder import working_directory
from skyward.node.settings import in_words
from skyward.transport import blobs, exceptions
from skyward.transport.frames import Buffer, nbytes

if TYPE_CHECKING:
    from skyward.history.recorder import Recorder
    from skyward.setup.fleet import Fleet

__all__ = ["keep_failed_calls"]

log = logging.getLogger("skyward.history")

_MOST_WAITING = 64 << 20
_LEFT_OUT = ("blobs", "each", "gang", "keep", "log", "place", "streams")  # of what a runner is told
_WITH_SECRET = "its function or its arguments hold a sky.Secret"
_SOURCE = re.compile(r'^ *File "(.+?)", line \d+', re.M)
_LARGEST_SOURCE = 1 << 20
_NOT_THE_USERS = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]))


def keep_failed_calls(
    recorder: Recorder | None,
    limit: int,
    steps: ExitStack,
    context: PoolContext,
    fleet: Fleet,
    error: PluginError | None = None,
) -> None:
    """Beside the pool's history, up to `limit` bytes; or the `error` of a hook at opening."""
    if recorder is None or not limit:
        return
    failed = _FailedCalls(recorder, limit, context, fleet)
    if error is None:
        fleet.engine.on_failed = failed.note
        recorder.meanwhile = failed.flush
        steps.callback(failed.close)  # before the directory of large arguments is removed
    elif error.hook == "around_app":
        failed.note_hook(error)


class _FailedCalls:
    """Does nothing for calls that succeed."""

    def __init__(self, recorder: Recorder, limit: int, context: PoolContext, fleet: Fleet) -> None:
        self._kept, self._limit = KeptCalls(recorder.path.parent, limit), limit
        self._context, self._fleet = context, fleet
        self._waiting: list[tuple[FailedCall, Sequence[Buffer], Mapping[str, blobs.Blob]]] = []
        self._size = 0  # of what waits to be written
        self._writing = threading.Lock()
        self._told = self._closed = False
        self._owner = os.getpid()
        self._pool = b""

    def note(self, call: Call, end: EndOfCall, error: BaseException | None) -> None:
        """With the engine's lock held, while the call has its arguments; `error` gets a note."""
        if self._closed or call.node is None:
            return
        size = sum(map(nbytes, call.pieces)) + sum(size for _, size in call.uploads.values())
        about = {key: value for key, value in call.header.items() if key not in _LEFT_OUT}
        files = {index: os.path.basename(str(at)) for index, (at, _) in call.header.get("blobs", {}).items()}
        made = replace(self._facts(end, self._refusal(call, size)), size=size, about=about, files=files)
        if made.refused:
            self._waiting.append((_refused(made), (), {}))
            return
        self._size += size
        self._fleet.store.retain(call.uploads)
        self._waiting.append((made, call.pieces, call.uploads))
        if error is not None:
            exceptions.noted(error, _rerun_note(call.id))

    def note_hook(self, error: PluginError) -> None:
        node, id, name = error.node or 0, new_id(), f"around_app of {error.plugin}"
        if node not in self._fleet.infos:
            return  # it had not got so far
        rank, text = node if error.rank is None else error.rank, exceptions.as_text(error)
        secret = any(holds_secret(self._hooks([each])) for each in self._context.plugins if each.name == error.plugin)
        refusal = f"the hooks of {error.plugin} hold a sky.Secret" if secret else ""
        made = self._facts((id, name, node, "error", 0.0, rank, text, 0, "", 0, 0, id, 0.0), refusal)
        self._waiting.append((made, (), {}))
        self.flush()
        if not refusal and not self._told:
            exceptions.noted(error, _rerun_note(id))

    def _facts(self, end: EndOfCall, refusal: str) -> FailedCall:
        id, name, node, outcome, _, rank, text, attempt, arguments, _, _, group, _ = end
        return FailedCall(
            id=id, name=name, arguments=arguments, time=time.time(), outcome=outcome, error=text, node=node, rank=rank,
            attempt=attempt, group=group, refused=refusal, info=self._fleet.infos[node].to_json(),
            machine=in_words(self._fleet.engine.greetings()[node]),
        )  # fmt: skip

    def _refusal(self, call: Call, size: int) -> str:
        """Why a call is not kept; empty if it is."""
        if call.inputs:
            return "an argument of it was an iterator, which can be read once"
        if call.needs:
            return "it took a result that stays on a node"
        if size > self._limit:
            return f"with its arguments it takes {size:,} bytes, more than max_replay_bytes={self._limit} of its pool"
        if holds_secret(call.pieces):
            return _WITH_SECRET
        if self._size and self._size + size > max(_MOST_WAITING, self._limit):
            return "too many calls failed at once, and it was not one of the first"
        return ""

    def flush(self) -> None:
        while self._waiting and os.getpid() == self._owner:
            with self._writing:
                if not self._waiting:
                    return
                call, pieces, files = self._waiting.pop(0)
                try:
                    self._write(call, pieces, files)
                except Exception as exc:  # the pool continues without it, and `sky replay` says that it is not there
                    log.log(logging.DEBUG if self._told else logging.WARNING, "a failed call is not kept: %s", exc)
                    self._told = True
                finally:
                    self._size -= call.size
                    self._fleet.store.release(list(files))

    def close(self) -> None:
        """Writes what is left, while the large arguments are there."""
        self._closed = True
        self.flush()

    def _write(self, call: FailedCall, pieces: Sequence[Buffer], files: Mapping[str, blobs.Blob]) -> None:
        contents: dict[str, Buffer] = {digest: blobs.read(blob) for digest, blob in files.items()}
        if not call.refused and holds_secret(contents.values()):
            call = _refused(replace(call, refused=_WITH_SECRET))
        if call.refused:
            self._kept.keep(call, (), {})
            return
        self._pool = self._pool or pickle.dumps(self._shared())
        contents[digest := blobs.digest(self._pool)] = self._pool
        pieces = [*pieces, _sources(call.error), b""]
        self._kept.keep(replace(call, files={**call.files, str(len(pieces) - 1): digest}), pieces, contents)

    def _shared(self) -> PoolOfCalls:
        from skyward.transport.includes import import_paths  # most pools need none

        image, context = self._context.image, self._context
        env = {name: value for name, value in without_secrets(image.env).items() if mask(value) == value}
        plain = Image(
            python=".".join(map(str, image.python_version)),
            pip=tuple(map(mask, image.pip)),
            pip_indexes=[PipIndex(mask(index.url), index.packages) for index in image.pip_indexes],
            build=image.build,
            env=env,
            allow_env=image.allow_env,
        )
        kept = [plugin for plugin in context.plugins if not holds_secret(self._hooks([plugin]))]
        directory = working_directory()
        return PoolOfCalls(
            name=context.name,
            interpreter=sys.executable,
            image=pickle.dumps(plain),
            packages=self._fleet.package_list(),
            secret_variables=sorted(set(image.env) - set(env)),
            directory=directory,
            paths=[os.path.join(directory, path) for path in import_paths(image, Path(directory))],
            hooks=self._hooks(kept),
            left_out=[plugin.name for plugin in context.plugins if plugin not in kept],
        )

    def _hooks(self, plugins: Sequence[Plugin]) -> list[bytes]:
        from skyward.setup.node_settings import packed_hooks

        return packed_hooks(plugins, list(self._fleet.by_node.values()))


def _rerun_note(call: str) -> str:
    return f"`sky replay {call}` runs it again on this computer, with --pdb in the debugger."


def _refused(call: FailedCall) -> FailedCall:
    return replace(call, size=0, about={}, files={})


def _sources(error: str) -> bytes:
    """The user's files in a traceback, as they are now."""
    found: dict[str, str] = {}
    for path in dict.fromkeys(_SOURCE.findall(error)):
        try:
            theirs = not path.startswith(_NOT_THE_USERS) and "/site-packages/" not in path
            if theirs and os.path.getsize(path) <= _LARGEST_SOURCE:
                found[path] = Path(path).read_text()
        except (OSError, ValueError):
            continue  # a file of the node, or of a notebook's cell
    made = json.dumps(found).encode()
    return b"{}" if holds_secret([made]) else made
