"""Compute that exists only while it is needed."""

from skyward import accelerators, errors, events, integrations, plugins
from skyward.accelerators import Accelerator
from skyward.errors import Preempted, SkywardError
from skyward.image import Image, PipIndex
from skyward.output import CallbackWriter, redirect_output, silent, stderr, stdout
from skyward.plugin import Cluster, Plugin
from skyward.pool import ComputePool, plan
from skyward.preemption import Preemption, preempted
from skyward.provider import Machine, Offer, Provider
from skyward.providers import AWS, SSH, Local
from skyward.runtime import InstanceInfo, instance_info, is_head
from skyward.sharding import shard
from skyward.spec import Spec, Volume, Worker
from skyward.task import Compute, PendingCompute, PendingComputeGroup, compute, gather, sky

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
    "Volume",
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
