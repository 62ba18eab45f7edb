"""Answers mistakes in calls of our functions: misspelt names, unknown options, calls that were never sent."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from skyward.errors import REMOTE, SkywardError

__all__ = [
    "FOR_FUNCTIONS",
    "FOR_GROUPS",
    "FOR_HOSTS",
    "FOR_IMAGES",
    "FOR_MACHINES",
    "FOR_POOLS",
    "SPELLED",
    "Unsent",
    "corrects",
    "corrects_call",
    "deprecated",
    "hide_frames",
    "instead_of",
    "usable",
]


K = TypeVar("K", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_VARARGS = 0x04

SPELLED = "__skyward_spelled__"
"""How users write the function."""

_PIP = "`pip=[...]`"
FOR_IMAGES = {
    **dict.fromkeys(("packages", "requirements", "dependencies", "pip_packages"), _PIP),
    **dict.fromkeys(("include", "files", "local_files", "paths"), "`includes=[...]`"),
    **dict.fromkeys(("environment", "variables", "env_vars", "envs"), '`env={"NAME": "value"}`'),
    **dict.fromkeys(("index_url", "extra_index_url", "indexes"), '`pip_indexes=[sky.PipIndex(url, ["package"])]`'),
    "python_version": '`python="3.12"`',
}
FOR_FUNCTIONS = {
    **dict.fromkeys(
        ("gpu", "gpus", "num_gpus", "accelerator"), '`sky.ComputePool(accelerator="A100")`: machines are the pool\'s'
    ),
    **dict.fromkeys(("cpu", "cpus", "num_cpus", "memory"), "`sky.ComputePool(vcpus=..., memory_gb=...)`"),
    **dict.fromkeys(("image", "pip", "env"), "`sky.ComputePool(image=sky.Image(...))`"),
    **dict.fromkeys(("max_retries", "retry"), "`retries=`"),
}
FOR_GROUPS = {
    "timeout": "`@sky.compute(timeout=seconds)`, or `fn(x).with_timeout(seconds)` for a call",
    **dict.fromkeys(("chunksize", "chunk_size", "batch_size"), "nothing: chunks are sized by how long items take"),
    **dict.fromkeys(("max_workers", "n_jobs", "concurrency"), "`sky.ComputePool(nodes=..., concurrency=...)`"),
}
FOR_HOSTS = {
    "host": '`hosts=["..."]`',
    "username": "`user=`",
    **dict.fromkeys(("key_file", "keyfile", "identity_file", "private_key", "ssh_key"), '`key="~/.ssh/id_ed25519"`'),
    "password": 'a key: `key="~/.ssh/id_ed25519"`, or one in your ssh agent; nobody types passwords for a program',
    "timeout": "`ssh_timeout=`, in seconds",
}
FOR_MACHINES = {
    "instance_type": '`instance_types=["g5.xlarge"]`',
    "zone": '`zones=["us-east-1a"]`',
    "subnet": "`subnet_id=`",
    "security_group": "`security_group_id=`",
    "spot": '`sky.ComputePool(provider=sky.AWS(), allocation="spot")`',
    **dict.fromkeys(("accelerator", "gpu", "gpus"), '`sky.ComputePool(provider=sky.AWS(), accelerator="A100")`'),
}
FOR_POOLS = {
    "hosts": '`provider=sky.SSH(hosts=["gpu1", "gpu2"])`',
    **dict.fromkeys(("region", "profile", "zones", "instance_types"), '`provider=sky.AWS(region="eu-west-1")`'),
    **dict.fromkeys(("gpu", "gpus", "num_gpus", "gpu_type"), '`accelerator="A100"`, or `"A100:2"` for two per node'),
    **dict.fromkeys(("cpu", "cpus", "num_cpus", "cores"), "`vcpus=`"),
    **dict.fromkeys(("memory", "mem", "ram"), "`memory_gb=`, in GB"),
    **dict.fromkeys(
        ("workers", "num_workers", "n_workers", "max_workers", "processes", "n_jobs", "size"),
        "`nodes=`, or `processes_per_node=`",
    ),
    **dict.fromkeys(("num_nodes", "n_nodes", "node_count", "num_hosts", "instances"), "`nodes=`"),
    **dict.fromkeys(("threads", "n_threads"), "`concurrency=`"),
    **dict.fromkeys(("pip", "packages", "requirements", "dependencies"), "`image=sky.Image(pip=[...])`"),
    **{name: f"`image=sky.Image({name}=...)`" for name in ("apt", "env", "python", "includes", "lock")},
    "spot": '`allocation="spot"`',
    "timeout": "`default_compute_timeout=` for calls, `provision_timeout=` for opening the pool, in seconds",
    **dict.fromkeys(("verbose", "quiet", "silent"), '`console="plain"`, or `console=False` for no output'),
    "specs": "no name: `sky.ComputePool(sky.Spec(...), sky.Spec(...))`",
}


def corrects(hints: Mapping[str, str], example: str = "") -> Callable[[K], K]:
    """Class decorator: an unknown option gets an error with the right one."""

    def wrap(kind: K) -> K:
        kind.__init__ = _checked(kind.__init__, f"{kind.__name__}()", f"sky.{kind.__name__}", hints, example)
        return kind

    return wrap


def corrects_call(spelled: str, hints: Mapping[str, str] = {}, example: str = "") -> Callable[[F], F]:
    return lambda plain: cast(F, _checked(plain, f"{spelled}()", spelled, hints, example))


def _checked(
    plain: Callable[..., Any], words: str, spelled: str, hints: Mapping[str, str], example: str
) -> Callable[..., Any]:
    code = plain.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    own = names[:1] == ("self",)
    required = names[: code.co_argcount - len(plain.__defaults__ or ())]
    most = None if code.co_flags & _VARARGS else code.co_argcount

    @functools.wraps(plain)
    def call(*args: Any, **options: Any) -> Any:
        for name in options:
            if name not in names:
                raise TypeError(_sentence(words, spelled, name, names[own:], hints))
        if most is not None and len(args) > most:
            instead = f" Write {example}." if example else f" The others have names: help({spelled})."
            raise TypeError(
                f"{words} takes {most - own or 'no'} arguments without a name, not {len(args) - own}.{instead}"
            )
        missing = [name for name in required[len(args) :] if name not in options]
        if missing:
            instead = f" Write {example}." if example else ""
            raise TypeError(f"{words} needs {' and '.join(missing)}.{instead}")
        try:
            return plain(*args, **options)
        except Exception as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            raise

    setattr(call, SPELLED, spelled)
    return call


def _sentence(words: str, spelled: str, name: str, known: tuple[str, ...], hints: Mapping[str, str]) -> str:
    from difflib import get_close_matches

    if name in hints:
        return f"{words} has no option {name!r}. Write {hints[name]}."
    near = get_close_matches(name, known, 1, 0.6)
    found = f"Did you mean `{near[0]}`?" if near else f"help({spelled}) lists and explains them all."
    return f"{words} has no option {name!r}. {found}"


_AFTERWARDS = frozenset({"result", "get", "exception", "done", "cancel", "add_done_callback", "compute", "join"})


class Unsent:
    if TYPE_CHECKING:

        def _spelled(self) -> str: ...

    def __bool__(self) -> bool:
        words = self._spelled()
        raise TypeError(f"{words} has not run: it has no truth value. Send it to a pool first, `{words} >> pool`.")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Unsent):
            return self is other
        words = self._spelled()
        raise TypeError(f"{words} has not run: it equals nothing yet. Send it first: `({words} >> pool) == ...`.")

    __hash__ = object.__hash__

    def __await__(self) -> NoReturn:
        words = self._spelled()
        raise TypeError(f"{words} was not sent anywhere: `await ({words} > pool)`.")

    if not TYPE_CHECKING:  # for type checkers there are no such methods, and using them is an error

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            words = self._spelled()
            if name in _AFTERWARDS:
                hint = f"{words} has not run: it has no {name}() yet. Send it: `{words} >> pool`, or"
                raise AttributeError(f"{hint} `({words} > pool).result()` to continue meanwhile.")
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: {words} has not run. "
                f"If its result has it: `({words} >> pool).{name}`."
            )

        def _refuse(self, *_: object) -> NoReturn:
            words = self._spelled()
            raise TypeError(f"{words} has not run: it has no value to work with yet. Send it first: `{words} >> pool`.")

        # not __iter__, __next__ and __call__: it would pass for an iterator, or for a function
        __getitem__ = __len__ = __int__ = __float__ = __neg__ = _refuse
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __floordiv__ = __mod__ = __pow__ = __ge__ = __le__ = _refuse

        def __lshift__(self, target: object) -> NoReturn:
            words = self._spelled()
            raise TypeError(f"`{words} << ...`: a call is sent with `{words} >> pool`.")

        def __or__(self, target: object) -> NoReturn:
            words = self._spelled()
            raise TypeError(
                f"`{words} | ...`: a call is sent with `{words} >> pool`; several together with `(a() & b()) >> pool`."
            )


_ELSEWHERE = {
    **dict.fromkeys(("remote", "function", "task", "delayed", "cls"), "@sky.compute"),
    **dict.fromkeys(("Pool", "Client", "App", "Executor", "init", "cluster"), "sky.ComputePool(...)"),
    **dict.fromkeys(("run", "call", "get", "wait"), "fn(x) >> pool"),
    **dict.fromkeys(("submit", "spawn"), "fn(x) > pool"),
    **dict.fromkeys(("map", "starmap"), "pool.map(fn, items)"),
    "broadcast": "fn(x) @ pool",
    "put": "pool.put(obj)",
    **dict.fromkeys(("rank", "local_rank", "world_size", "node", "nodes"), "sky.instance_info().rank and so on"),
    **dict.fromkeys(("Ssh", "hosts", "Hosts"), "sky.SSH(hosts=[...])"),
    **dict.fromkeys(("torch", "jax", "keras", "huggingface", "joblib", "sklearn"), "sky.plugins.{name}()"),
    **dict.fromkeys(("GCP", "Azure", "RunPod", "Lambda"), "sky.AWS(), or sky.SSH(hosts=[...]) for its machines"),
}


def instead_of(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    if name in _ELSEWHERE:
        return f". Write {_ELSEWHERE[name].format(name=name)}"
    folded = {other.lower(): other for other in known}
    near = get_close_matches(name.lower(), list(folded), 1, 0.7)
    return f". Did you mean sky.{folded[near[0]]}?" if near else ""


def deprecated(name: str, instead: str, *, removal: str) -> None:
    """Warns at the caller's line that `name` works until version `removal` only."""
    frame, level = sys._getframe(1), 2  # pyright: ignore[reportPrivateUsage] - warnings can skip our files from 3.12 on
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "skyward":
        frame, level = frame.f_back, level + 1
    text = f"{name} is deprecated, and will be removed in Skyward {removal}. Write {instead} instead."
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def usable(name: str) -> bool:
    """Whether a name is safe as part of a path and of a command."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None


_OURS = (
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    os.path.join(os.path.dirname(os.__file__), "concurrent", "futures", ""),
)


def hide_frames(exc: BaseException) -> None:
    """Drops our frames below the caller's, unless user code is below. Called where users enter."""
    notes = getattr(exc, "__notes__", ())
    if not isinstance(exc, SkywardError) and not any(REMOTE in note for note in notes if isinstance(note, str)):
        return  # it may be a mistake of ours: all frames are needed
    top = exc.__traceback__
    below = top.tb_next if top is not None else None
    while below is not None:
        if not below.tb_frame.f_code.co_filename.startswith(_OURS):
            return
        below = below.tb_next
    if top is not None:
        top.tb_next = None
