"""Options with a wrong name, answered with the right one: what other tools call it, or what was nearly typed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["FOR_HOSTS", "FOR_IMAGES", "FOR_MACHINES", "FOR_POOLS", "corrects"]

K = TypeVar("K", bound=type)

_PIP = "`pip=[...]`"
FOR_IMAGES = {
    **dict.fromkeys(("packages", "requirements", "dependencies", "pip_packages"), _PIP),
    **dict.fromkeys(("include", "files", "local_files", "paths"), "`includes=[...]`"),
    **dict.fromkeys(("environment", "variables", "env_vars", "envs"), '`env={"NAME": "value"}`'),
    **dict.fromkeys(("index_url", "extra_index_url", "indexes"), '`pip_indexes=[sky.PipIndex(url, ["package"])]`'),
    "python_version": '`python="3.12"`',
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
    **dict.fromkeys(("gpu", "gpus", "num_gpus", "gpu_type"), '`accelerator="A100"`, of two on each node `"A100:2"`'),
    **dict.fromkeys(("cpu", "cpus", "num_cpus", "cores"), "`vcpus=`"),
    **dict.fromkeys(("memory", "mem", "ram"), "`memory_gb=`, in GB"),
    **dict.fromkeys(
        ("workers", "num_workers", "n_workers", "max_workers", "processes", "n_jobs", "size"),
        "`nodes=`, or `processes_per_node=`",
    ),
    **dict.fromkeys(("threads", "n_threads"), "`concurrency=`"),
    **dict.fromkeys(("pip", "packages", "requirements", "dependencies"), "`image=sky.Image(pip=[...])`"),
    **{name: f"`image=sky.Image({name}=...)`" for name in ("apt", "env", "python", "includes", "lock")},
    "spot": '`allocation="spot"`',
    "timeout": "`default_compute_timeout=` for calls, `provision_timeout=` for opening the pool, in seconds",
    **dict.fromkeys(("verbose", "quiet", "silent"), '`console="plain"`, or `console=False` for no output'),
    "specs": "no name: `sky.ComputePool(sky.Spec(...), sky.Spec(...))`",
}


def corrects(hints: Mapping[str, str]) -> Callable[[K], K]:
    """For classes whose options users type: one that is not there is answered with what to write instead."""

    def wrap(kind: K) -> K:
        plain: Callable[..., None] = kind.__init__
        known = frozenset(plain.__code__.co_varnames[: plain.__code__.co_argcount + plain.__code__.co_kwonlyargcount])

        @functools.wraps(plain)
        def init(self: object, /, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    raise TypeError(_sentence(kind.__name__, name, known - {"self"}, hints))
            plain(self, *args, **options)

        kind.__init__ = init
        return kind

    return wrap


def _sentence(kind: str, name: str, known: frozenset[str], hints: Mapping[str, str]) -> str:
    from difflib import get_close_matches

    if name in hints:
        return f"{kind}() has no option {name!r}. Write {hints[name]}."
    near = get_close_matches(name, sorted(known), 1, 0.6)
    found = f"Did you mean `{near[0]}`?" if near else f"help(sky.{kind}) lists and explains them all."
    return f"{kind}() has no option {name!r}. {found}"
