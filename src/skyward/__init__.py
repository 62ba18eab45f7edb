"""Compute that exists only while it is needed."""

from skyward import accelerators, errors, events, integrations, plugins
from skyward.accelerators import Accelerator
from skyward.api.compute import Compute, PendingCompute, PendingComputeGroup, compute, gather, sky
from skyward.api.image import Image, PipIndex
from skyward.api.info import InstanceInfo, instance_info, is_head
from skyward.api.plugin import Cluster, Plugin
from skyward.api.preemption import Preemption, preempted
from skyward.api.provider import Machine, Offer, Provider
from skyward.api.sharding import shard
from skyward.api.spec import Spec, Worker
from skyward.errors import Preempted, SkywardError
from skyward.node.output import CallbackWriter, redirect_output, silent, stderr, stdout
from skyward.pool.pool import ComputePool, plan
from skyward.providers import AWS, SSH, Local

__version__ = "0.1.0"

__all__ = [
    "AWS",
    "SSH",
    "Accelerator",
    "CallbackWriter",
    "Cluster",
    "Compute",
    "ComputePool",
    "Image",
    "InstanceInfo",
    "Local",
    "Machine",
    "Offer",
    "PendingCompute",
    "PendingComputeGroup",
    "PipIndex",
    "Plugin",
    "Preempted",
    "Preemption",
    "Provider",
    "SkywardError",
    "Spec",
    "Worker",
    "accelerators",
    "compute",
    "errors",
    "events",
    "gather",
    "instance_info",
    "integrations",
    "is_head",
    "plan",
    "plugins",
    "preempted",
    "redirect_output",
    "shard",
    "silent",
    "sky",
    "stderr",
    "stdout",
]
