"""Directories that only this user can enter, at every level.

Whoever can write into a directory can replace what is in it, unless it is sticky, as /tmp is. So every level counts,
and every link on the way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from functools import lru_cache
from pathlib import Path

from skyward.errors import SkywardError

__all__ = ["NotPrivate", "check", "check_file", "fresh", "hold", "is_locked", "is_private", "let_go", "make"]


_NAME = "skyward"
_OWN = "SKYWARD_OWN"  # directories that nobody else reaches, separated by spaces: a pod's volumes are open to all users
_LINKS = 40


class NotPrivate(SkywardError, PermissionError):
    """Other users can write to it; the text says why."""


def make(root: Path, *names: str) -> Path:
    """Makes what is missing of `root` and those named within it, for this user alone."""
    path = _walk(root, create=True)
    _close(path, ours=path.name == _NAME)
    for name in names:
        path = _walk(path / name, create=True)
        _close(path, ours=True)
    return path


def check(root: Path, *names: str) -> bool:
    try:
        path = _walk(root, create=False)
        _close(path, ours=path.name == _NAME)
        for name in names:
            path = _walk(path / name, create=False)
            _close(path, ours=True)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_file(path: Path) -> None:
    """Raises NotPrivate if another user could have written this file, or put it there."""
    folder = _walk(path.parent, create=False)
    _close(folder, ours=False)
    found = os.lstat(folder / path.name)
    if found.st_uid not in _trusted():
        raise NotPrivate(f"{path} belongs to another user (uid {found.st_uid})")
    if stat.S_ISLNK(found.st_mode):
        check_file(folder / os.readlink(folder / path.name))
    elif _others_write(found):
        raise NotPrivate(f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):o})")


def fresh(prefix: str, *bases: str) -> str:
    """With an unguessable name, in the first suitable of `bases`, or in /tmp."""
    import logging  # neither in runners
    import tempfile

    refused: list[str] = []
    for base in bases or (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        try:
            _walk(Path(base), create=False)
            made = tempfile.mkdtemp(prefix=prefix, dir=base)
        except OSError as exc:
            refused.append(str(exc))
            continue
        os.chmod(made, 0o700)  # a umask may have taken even our own rights away
        if refused:
            logging.getLogger("skyward.private").warning("%s; %s is used instead.", "; ".join(refused), base)
        return made
    raise NotPrivate(
        f"there is no place for temporary files: {'; '.join(refused)}. Set TMPDIR to a directory of your own."
    )


def is_private(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _walk(path: Path, create: bool) -> Path:
    todo = list(reversed(Path(os.path.abspath(path)).parts))
    here, links = Path(todo.pop()), 0
    _check_level(here, os.lstat(here))
    while todo:
        name = todo.pop()
        if name == "..":
            here = here.parent
            continue
        below = here / name
        try:
            found = os.lstat(below)
        except FileNotFoundError:
            if not create:
                raise
            found = _made(below)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if found.st_uid not in _trusted() or links > _LINKS:
                raise NotPrivate(f"{below} is a link that belongs to another user (uid {found.st_uid})")
            target = Path(os.readlink(below))
            if target.is_absolute():
                here = Path(target.anchor)
            todo += [part for part in reversed(target.parts) if part != target.anchor]
            continue
        _check_level(below, found)
        here = below
    return here


def _made(path: Path) -> os.stat_result:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass  # somebody was faster; it is checked like any other
    else:
        os.chmod(path, 0o700)  # a umask may have taken even our own rights away
    return os.lstat(path)


def _check_level(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate(f"{path} is not a directory")
    if found.st_uid not in _trusted():
        raise NotPrivate(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & stat.S_ISVTX:
        return  # others may add to it, and not replace what is there
    if _others_write(found) and not any(path.is_relative_to(own) for own in os.environ.get(_OWN, "").split()):
        raise NotPrivate(f"others can write into {path} (mode {stat.S_IMODE(found.st_mode):o})")


def _others_write(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid)))


def _close(path: Path, ours: bool) -> None:
    """Refuses a directory that others could write to; takes their rights away if it is `ours`."""
    found = os.lstat(path)
    if found.st_mode & stat.S_IWOTH:  # sticky or not
        raise NotPrivate(f"others can write into {path} (mode {stat.S_IMODE(found.st_mode):o})")
    if ours and found.st_uid == os.geteuid() and found.st_mode & 0o077:
        os.chmod(path, 0o700)


def _trusted() -> tuple[int, ...]:
    return 0, os.geteuid(), *_unmapped()


@lru_cache(1)
def _unmapped() -> tuple[int, ...]:
    try:
        with open("/proc/self/uid_map") as map, open("/proc/sys/kernel/overflowuid") as overflow:
            whole = map.read().split() == ["0", "0", "4294967295"]
            return () if whole else (int(overflow.read()),)
    except (OSError, ValueError):
        return ()


def _own_group(gid: int) -> bool:
    """Whether a group is root's, or has only this user, as is usual on Debian."""
    if gid == 0:
        return True
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and not set(group.gr_mem) - {user}


# Files that are locked as long as a process lives: whether it does can be seen from every container and namespace.
#
# A process id says nothing in another PID namespace, and may belong to another process by now.


_held: dict[str, int] = {}


def hold(path: str) -> int:
    """Makes a file, locked until this process ends or calls `let_go`. OSError if the file system has no locks."""
    unseen = f"{path}.{os.urandom(6).hex()}"
    fd = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unseen, path)
    except BaseException:
        os.unlink(unseen)
        os.close(fd)
        raise
    _held[path] = fd
    return fd


def let_go(path: str) -> None:
    fd = _held.pop(path, None)
    if fd is not None:
        os.close(fd)


def is_locked(path: str | Path) -> bool:
    """True also where that cannot be known; False for a link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        return exc.errno != errno.ELOOP
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is held, or the file system has no locks
        return True
    finally:
        os.close(fd)
    return False


def _in_child() -> None:
    # The lock belongs to all copies of the descriptor: a child that outlives us must not make us look alive.
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_in_child)
