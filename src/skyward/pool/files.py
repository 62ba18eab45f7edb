"""Files between this computer and the nodes of a pool: `push` and `pull`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward.api.keywords import check_path, corrects_call
from skyward.errors import InvalidArgument, TransferError
from skyward.machines.parallel import each

if TYPE_CHECKING:
    from skyward.api.provider import Provider
    from skyward.api.transfer import Transfer
    from skyward.client.engine import Engine
    from skyward.client.push import Begin
    from skyward.events import Event
    from skyward.pool.state import PoolState
    from skyward.setup.bringup import PoolHosts
    from skyward.transport.blobs import Store

__all__ = ["Files"]

Path = str | os.PathLike[str]

_SHOWN = 4_000_000
_MEGABYTE = 1_000_000

_pushing = threading.Lock()


class Files:
    """The part of a pool that copies files."""

    if TYPE_CHECKING:
        name: str
        provider: Provider
        _state: PoolState
        _engine: Engine
        _hosts: PoolHosts
        _store: Store

        def _emit(self, event: Event) -> None: ...

    @corrects_call("pool.push", example='pool.push("data")')
    def push(self, local: Path, remote: Path | None = None, *, progress: bool = True) -> Transfer:
        """Copies a file or a folder to every node; only what has changed since, by size and time of last change.

        Args:
            local: a file or a folder of this computer.
            remote: where it goes on the nodes, relative to the working directory that bodies start in. A folder's
                contents go into the folder of this name; a file gets this name, or goes into a folder of this name if
                there is one. Default: the same path as `local`, or its last part if `local` is absolute.
            progress: whether the live view shows how far it is. Default: True.

        Each byte leaves this computer once, where nodes reach each other. What is interrupted goes on where it stopped
        when it is called again. Nothing is deleted on the nodes. Raises `sky.errors.TransferError`.
        """
        self._state.check_open()
        from skyward.client.push import Push

        source = check_path("local", local, 'pool.push("data")')
        target = _target(source, None if remote is None else check_path("remote", remote, 'pool.push("data", "data")'))
        nodes = self._machines()
        with _pushing:  # two at once could write the same file
            push = Push(self._engine, self._store, nodes, self.provider.access.local)
            done = push.run(source, target, self._counting(f"push {_name(source)}", progress))
        self._tell_left_out("push", source, done)
        return done

    @corrects_call("pool.pull", example='pool.pull("out", "results")')
    def pull(self, remote: Path, local: Path, node: int | None = None, *, progress: bool = True) -> Transfer:
        """Copies a file or a folder from nodes to this computer; only what has changed since.

        Args:
            remote: a file or a folder of the nodes, relative to the working directory that bodies start in.
            local: where it goes. From one node: a folder's contents go into the folder of this name; a file gets this
                name, or goes into a folder of this name if there is one. From all nodes: the folder in which each node
                gets a folder, `node-0`, `node-1`, ...
            node: the number of one node. Default: all nodes; those that do not have it are left out and named.
            progress: whether the live view shows how far it is. Default: True.

        Nothing is written outside `local`, whatever a node says. What is interrupted goes on where it stopped when it
        is called again. Nothing is deleted here. Raises `sky.errors.TransferError`.
        """
        self._state.check_open()
        from skyward.api.transfer import Transfer

        source = check_path("remote", remote, 'pool.pull("out", "results")')
        target = check_path("local", local, 'pool.pull("out", "results")')
        if node is not None:
            self._check_node(node)
            done = self._pull(node, source, target, progress)
        else:
            nodes = list(self._engine.file_nodes())
            parts = each(lambda n: self._pulled(n, source, os.path.join(target, f"node-{n}", ""), progress), nodes)
            there = [(n, part) for n, part in zip(nodes, parts, strict=True) if isinstance(part, Transfer)]
            missing = [part for part in parts if not isinstance(part, Transfer)]
            if not there:
                raise missing[0]
            done = Transfer(
                sum(part.files for _, part in there),
                sum(part.bytes for _, part in there),
                sum(part.unchanged for _, part in there),
                tuple(
                    [f"node {n}: {text}" for n, part in there for text in part.left_out]
                    + [f"node {error.node}, which has no {source}" for error in missing]
                ),
            )
        self._tell_left_out("pull", source, done)
        return done

    def _pulled(self, node: int, source: str, target: str, progress: bool) -> Transfer | TransferError:
        """The same of one node among all: one that does not have it is no failure."""
        try:
            return self._pull(node, source, target, progress)
        except TransferError as exc:
            if exc.errno == errno.ENOENT and exc.node is not None:
                return exc
            raise

    def _pull(self, node: int, source: str, target: str, progress: bool) -> Transfer:
        from skyward.client.pull import Pull

        name = f"pull {_name(source)} from node {node}"
        return Pull(self._engine, node, self._say).run(source, target, self._counting(name, progress))

    def _machines(self) -> list[int]:
        """A node of each machine that is there; those that are lost are named."""
        nodes = self._engine.file_nodes()
        lost = [str(node) for node, gone in nodes.items() if gone]
        if lost:
            self._say(f"push leaves out nodes that are lost: {', '.join(lost)}. Push again when they are back.")
        there = [node for node, gone in nodes.items() if not gone]
        unique = {id(self._hosts.by_node[node].keeper): node for node in reversed(there)}
        return sorted(unique.values())

    def _check_node(self, node: int) -> None:
        nodes = self._engine.file_nodes()
        if type(node) is not int or node not in nodes:
            raise InvalidArgument(f"node={node!r}: the pool has the nodes 0 to {len(nodes) - 1}.")

    def _counting(self, name: str, progress: bool) -> Begin:
        """Shows megabytes as the views show calls that are done; not for what takes no time."""
        from skyward.client.progress import GroupCounter

        def begin(size: int) -> Callable[[int], None]:
            if not progress or size < _SHOWN:
                return lambda more: None
            counter, done = GroupCounter(self.name, f"{name} (MB)", size // _MEGABYTE, self._emit), 0

            def add(more: int) -> None:
                nonlocal done
                before, done = done // _MEGABYTE, done + more
                counter.add(done // _MEGABYTE - before)

            return add

        return begin

    def _tell_left_out(self, what: str, path: str, done: Transfer) -> None:
        if done.left_out:
            more = f"; and {len(done.left_out) - 5} more" if len(done.left_out) > 5 else ""
            self._say(f"{what} of {path} leaves out: {'; '.join(done.left_out[:5])}{more}.")

    def _say(self, text: str) -> None:
        from skyward.events import Notice

        self._emit(Notice(self.name, text, "warning"))


def _target(path: str, remote: str | None) -> str:
    if remote is not None:
        return remote
    if os.path.isabs(path) or os.path.normpath(path).startswith(".."):
        return os.path.basename(os.path.abspath(path))
    return os.path.normpath(path)


def _name(path: str) -> str:
    return os.path.basename(os.path.normpath(path)) or path
