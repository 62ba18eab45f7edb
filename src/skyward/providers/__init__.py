"""Providers, imported when first used: a pool on this computer does not load the others."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["AWS", "SSH", "Dask", "Join", "Kubernetes", "Local", "Ray", "Slurm"]

_HOMES = {
    "AWS": "skyward.providers.aws.provider",
    "SSH": "skyward.providers.ssh",
    "Dask": "skyward.providers.dask",
    "Join": "skyward.providers.join",
    "Kubernetes": "skyward.providers.kubernetes.provider",
    "Local": "skyward.providers.local",
    "Ray": "skyward.providers.ray.provider",
    "Slurm": "skyward.providers.slurm.provider",
}

if TYPE_CHECKING:
    from skyward.providers.aws.provider import AWS
    from skyward.providers.dask import Dask
    from skyward.providers.join import Join
    from skyward.providers.kubernetes.provider import Kubernetes
    from skyward.providers.local import Local
    from skyward.providers.ray.provider import Ray
    from skyward.providers.slurm.provider import Slurm
    from skyward.providers.ssh import SSH
else:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'skyward.providers' has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(_HOMES[name]), name)
        return found
