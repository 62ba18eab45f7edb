"""What the failed calls of a pool share, and how keeping them is set up when the pool opens."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyward.api.context import PoolContext
from skyward.api.image import mask
from skyward.api.secret import without_secrets
from skyward.errors import PluginError
from skyward.node.failed_call import FailedCall, NodeFacts, PoolOfCalls
from skyward.transport import exceptions

if TYPE_CHECKING:
    from skyward.history.recorder import Recorder
    from skyward.setup.fleet import Fleet

__all__ = ["keep_failed_calls", "keep_failed_hook"]

log = logging.getLogger("skyward.history")


def keep_failed_calls(
    recorder: Recorder | None, limit: int, context: PoolContext, fleet: Fleet, steps: ExitStack
) -> None:
    """Has calls that fail kept beside the pool's history, up to `limit` bytes; nothing without a history."""
    if recorder is None or not limit:
        return
    from skyward.client.failed_calls import FailedCalls
    from skyward.history.failed_calls import KeptCalls

    about = _Pool(context, fleet)
    failed = FailedCalls(KeptCalls(recorder.path.parent, limit), limit, fleet.store, about.shared, about.place)
    fleet.engine.on_failed = failed.failed
    recorder.meanwhile = failed.flush
    steps.callback(failed.close)  # before the directory of large arguments is removed


def keep_failed_hook(
    recorder: Recorder | None, limit: int, context: PoolContext, fleet: Fleet, error: PluginError
) -> None:
    """Keeps that a plugin's hook failed on a node when the pool was opened, as a call without a function."""
    if recorder is None or not limit or error.hook != "around_app":
        return
    from skyward.client.call import new_id
    from skyward.client.failed_calls import rerun_note
    from skyward.history.failed_calls import KeptCalls

    about, kept, node, id = _Pool(context, fleet), KeptCalls(recorder.path.parent, limit), error.node or 0, new_id()
    try:
        info, facts = about.place(node)
        shared, pieces = about.shared()
        secret = f"the hooks of {error.plugin} hold a sky.Secret" if error.plugin in shared.left_out else ""
        rank = node if error.rank is None else error.rank
        call = FailedCall(
            id=id, name=f"around_app of {error.plugin}", arguments="", time=time.time(), outcome="error", node=node,
            error=exceptions.as_text(error), rank=rank, attempt=0, group=id, refused=secret, info=info, facts=facts,
        )  # fmt: skip
        kept.keep_pool(shared, pieces)
        kept.keep(call, (), {})
    except (OSError, KeyError, IndexError) as exc:  # a full disk, or the node had not got so far
        log.info("the failed hook is not kept: %s", exc)
        return
    if not secret:
        exceptions.noted(error, rerun_note(id))


@dataclass(frozen=True)
class _Pool:
    context: PoolContext
    fleet: Fleet

    def place(self, node: int) -> tuple[str, NodeFacts]:
        about = self.fleet.engine.abouts()[node]
        facts = NodeFacts(
            hostname=about.get("hostname", ""),
            python=tuple(about.get("python", ())),
            system=about.get("system", ""),
            cpus=about.get("cpus", 0),
            gpus=tuple(gpu["name"] for gpu in about.get("gpus", ())),
        )
        return self.fleet.info(node).to_json(), facts

    def shared(self) -> tuple[PoolOfCalls, Sequence[bytes]]:
        """Runs in a thread of its own, when the first call has failed."""
        image, context = self.context.image, self.context
        hooks, left_out, pieces = self._hooks()
        env = {name: value for name, value in without_secrets(image.env).items() if mask(value) == value}
        listed = self.fleet.package_list()
        made = PoolOfCalls(
            pool=context.name,
            interpreter=sys.executable,
            python=".".join(map(str, image.python_version)),
            pip=tuple(map(mask, image.pip)),
            pip_indexes=tuple((mask(index.url), tuple(index.packages)) for index in image.pip_indexes),
            build=tuple(image.build),
            packages=listed or (_installed_here() if context.local else ""),
            locked=bool(listed),
            env=env,
            secret_variables=sorted(set(image.env) - set(env)),
            directory=_directory(),
            paths=self._paths(),
            hooks=hooks,
            left_out=left_out,
        )
        return made, pieces

    def _hooks(self) -> tuple[list[tuple[str, int, bool]], list[str], list[bytes]]:
        """Each plugin's hooks by themselves, so that those with a secret can be left out."""
        from skyward.client.failed_calls import holds_secret
        from skyward.setup.node_settings import packed_hooks

        found: list[tuple[str, int, bool]] = []
        left_out: list[str] = []
        all_pieces: list[bytes] = []
        for plugin in self.context.plugins:
            pieces = packed_hooks([plugin], list(self.fleet.by_node.values()))
            if any(map(holds_secret, pieces)):
                left_out.append(plugin.name)
            elif pieces:
                found.append((plugin.name, len(pieces), plugin.around_app is not None))
                all_pieces += pieces
        return found, left_out, all_pieces

    def _paths(self) -> Sequence[str]:
        if not self.context.image.includes:
            return ()
        from skyward.transport.includes import import_paths

        return import_paths(self.context.image, Path.cwd())


def _installed_here() -> str:
    """The packages of this program, where nodes have the same: on this computer, in its own environment."""
    from importlib import metadata  # heavy, and most programs have no call that fails

    found = {each.name: each.version for each in metadata.distributions()}
    return "\n".join(f"{name}=={version}" for name, version in sorted(found.items()))


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return ""
