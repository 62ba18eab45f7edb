"""For tests of programs that use Skyward: a cloud that misbehaves on demand, and the contract of a provider."""

from skyward.testing.cloud import Cloud
from skyward.testing.contract import ProviderContract
from skyward.testing.faults import Call, Fault
from skyward.testing.gpus import nvidia_smi
from skyward.testing.machines import Hooks, Instance, NoticeHooks

__all__ = ["Call", "Cloud", "Fault", "Hooks", "Instance", "NoticeHooks", "ProviderContract", "nvidia_smi"]
