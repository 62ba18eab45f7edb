"""Hugging Face: packages, a login, and a group for the Trainer."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, overload

from skyward.api.image import Image
from skyward.api.info import InstanceInfo, pool_info
from skyward.api.plugin import Cluster, Plugin, makes_plugin
from skyward.api.secret import Secret
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument
from skyward.node.decorators import around_each_call
from skyward.plugins import _accelerate
from skyward.plugins._ranks import check_function, within
from skyward.plugins._torch import Backend, decorated
from skyward.transport.blobs import SCRATCH

__all__ = ["huggingface", "transformers"]

P = ParamSpec("P")
R = TypeVar("R")

# The Trainer cannot be made without accelerate, which transformers itself does not ask for.
_PACKAGES = ("transformers", "datasets", "tokenizers", "accelerate")


@makes_plugin("huggingface", example='sky.plugins.huggingface(token=sky.Secret.from_env("HF_TOKEN"))')
def huggingface(token: Secret | str) -> Plugin:
    """Transformers, datasets and tokenizers on every node, logged in with `token`."""
    if not isinstance(token, (Secret, str)):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise InvalidArgument(f"token has type {type(token).__name__}; {_ADVICE}")
    text = token.reveal() if isinstance(token, Secret) else token
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidArgument(f"token is {'empty' if not text.strip() else 'no line of plain characters'}; {_ADVICE}")
    return Plugin("huggingface", transform=_with_packages, around_app=functools.partial(_logged_in, Secret(text)))


@overload
def transformers(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def transformers(
    *, backend: Backend | None = None, timeout: float = 600
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@corrects_call("sky.integrations.transformers")
def transformers(
    fn: Callable[..., Any] | None = None, /, *, backend: Backend | None = None, timeout: float = 600
) -> Callable[..., Any]:
    """Forms the torch group that the Trainer finds by itself, on one node or many, before the body `fn`.

    Args:
        backend: "nccl" or "gloo". Default: NCCL where each rank has a GPU, else gloo.
        timeout: seconds that ranks wait for each other. Default: 600.
    """
    group: Callable[[Callable[..., Any]], Callable[..., Any]] = decorated(backend=backend, timeout=timeout)
    return functools.partial(_prepared, group=group) if fn is None else _prepared(fn, group)


def _prepared(fn: Callable[P, R], group: Callable[[Callable[P, R]], Callable[P, R]]) -> Callable[P, R]:
    check_function(fn, "transformers")
    return within(group(fn), _packages_found, "transformers")


@contextmanager
def _packages_found() -> Generator[None]:
    info = pool_info()
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None] if info else []
    if info and missing:
        raise ModuleNotFoundError(
            f"node {info.node} has no {' and no '.join(missing)}, which @sky.integrations.transformers needs; nothing "
            "in the pool's image asks for it. Add plugins=[sky.plugins.huggingface(token=...)] to the pool, or "
            'image=sky.Image(pip=["torch", "transformers", "accelerate"]).',
            name=missing[0],
        )
    yield


def _with_packages(image: Image, cluster: Cluster) -> Image:
    return image.adding(pip=_PACKAGES)


@contextmanager
def _logged_in(token: Secret, info: InstanceInfo) -> Generator[None]:
    # A file in memory goes away with its process, however that ends; the link gives it a name beside which the Hub
    # can put files of its own.
    fd = os.memfd_create("token")
    os.fchmod(fd, 0o600)
    os.write(fd, token.reveal().encode())
    with tempfile.TemporaryDirectory(
        prefix="skyward-hub-", dir=os.environ.get(SCRATCH), ignore_cleanup_errors=True
    ) as directory:
        path = os.path.join(directory, "token")
        os.symlink(f"/proc/{os.getpid()}/fd/{fd}", path)
        values = {"HF_TOKEN": token.reveal(), "HF_TOKEN_PATH": path}
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        around_each_call(functools.partial(_accelerate.around_call, info))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            os.close(fd)


_ADVICE = (
    "an access token of the Hugging Face Hub is needed, e.g. "
    'sky.plugins.huggingface(token=sky.Secret.from_env("HF_TOKEN")).'
)
