"""Compute that exists only while it is needed.

Names are imported when they are first used: the processes of a node import parts of this package and must stay small.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"  # the only place: packages and wheels take it from here

__all__ = [
    "AWS",
    "SSH",
    "Accelerator",
    "CallbackWriter",
    "Cluster",
    "Compute",
    "ComputePool",
    "Dask",
    "History",
    "Image",
    "InstanceInfo",
    "Join",
    "Kubernetes",
    "Local",
    "Machine",
    "Offer",
    "Once",
    "PendingCompute",
    "PendingComputeGroup",
    "PipIndex",
    "Plugin",
    "Preempted",
    "Preemption",
    "Provider",
    "Ray",
    "Ref",
    "Secret",
    "SharedBarrier",
    "SharedCounter",
    "SharedDict",
    "SharedEvent",
    "SharedLock",
    "SharedQueue",
    "SharedSet",
    "SkywardError",
    "Slurm",
    "Spec",
    "Stream",
    "Transfer",
    "Worker",
    "accelerators",
    "attach",
    "barrier",
    "compute",
    "counter",
    "detach",
    "errors",
    "event",
    "events",
    "gather",
    "instance_info",
    "integrations",
    "is_head",
    "lock",
    "once",
    "plan",
    "plugins",
    "preempted",
    "progress",
    "providers",
    "queue",
    "redirect_output",
    "replay",
    "shard",
    "silent",
    "sky",
    "stderr",
    "stdout",
    "testing",
]  # `dict` and `set` are there, too: `from skyward import *` must leave the built-in ones alone

_MODULES = ("accelerators", "errors", "events", "integrations", "plugins", "providers", "testing")
_NAMES = {
    "skyward.accelerators": "Accelerator",
    "skyward.api.compute": "Compute PendingCompute PendingComputeGroup compute sky gather",
    "skyward.api.image": "Image PipIndex",
    "skyward.api.futures": "Stream",
    "skyward.api.info": "InstanceInfo Preemption instance_info is_head preempted",
    "skyward.api.once": "Once once",
    "skyward.api.plugin": "Cluster Plugin",
    "skyward.api.provider": "Machine Offer Provider",
    "skyward.api.secret": "Secret",
    "skyward.api.ref": "Ref",
    "skyward.api.reporting": "progress",
    "skyward.api.sharding": "shard",
    "skyward.api.spec": "Spec Transfer Worker",
    "skyward.errors": "Preempted SkywardError",
    "skyward.history.history": "History",
    "skyward.node.shared.handles": (
        "SharedBarrier SharedCounter SharedDict SharedEvent SharedLock SharedQueue SharedSet"
    ),
    "skyward.node.shared.names": "barrier counter dict event lock queue set",
    "skyward.node.stdio": "CallbackWriter redirect_output silent stderr stdout",
    "skyward.pool.pool": "ComputePool plan",
    "skyward.pool.run": "attach detach",
    "skyward.pool.replay": "replay",
    "skyward.providers": "AWS Dask Join Kubernetes Local Ray SSH Slurm",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from skyward import accelerators, errors, events, integrations, plugins, providers, testing
    from skyward.accelerators import Accelerator
    from skyward.api.compute import Compute, PendingCompute, PendingComputeGroup, compute, gather, sky
    from skyward.api.futures import Stream
    from skyward.api.image import Image, PipIndex
    from skyward.api.info import InstanceInfo, Preemption, instance_info, is_head, preempted
    from skyward.api.once import Once, once
    from skyward.api.plugin import Cluster, Plugin
    from skyward.api.provider import Machine, Offer, Provider
    from skyward.api.ref import Ref
    from skyward.api.reporting import progress
    from skyward.api.secret import Secret
    from skyward.api.sharding import shard
    from skyward.api.spec import Spec, Transfer, Worker
    from skyward.errors import Preempted, SkywardError
    from skyward.history.history import History
    from skyward.node.shared.handles import (
        SharedBarrier,
        SharedCounter,
        SharedDict,
        SharedEvent,
        SharedLock,
        SharedQueue,
        SharedSet,
    )
    from skyward.node.shared.names import barrier, counter, event, lock, queue
    from skyward.node.shared.names import dict as dict
    from skyward.node.shared.names import set as set
    from skyward.node.stdio import CallbackWriter, redirect_output, silent, stderr, stdout
    from skyward.pool.pool import ComputePool, plan
    from skyward.pool.replay import replay
    from skyward.pool.run import attach, detach
    from skyward.providers import AWS, SSH, Dask, Join, Kubernetes, Local, Ray, Slurm
else:  # hidden from type checkers, for which every name would exist otherwise

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"skyward.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'skyward' has no attribute {name!r}{_hint(name)}", name=name)
        if "COMPUTE_POOL" not in os.environ:  # not on a node
            import_module("skyward.pool.lifetime")  # what it does when a program ends has its place in an order
        globals()[name] = found = getattr(import_module(_HOMES[name]), name)
        return found

    def _hint(name: str) -> str:
        if name.startswith("_"):
            return ""
        from skyward.api.usage_errors import instead_of

        return instead_of(name, __dir__())


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_HOMES, *_MODULES})
