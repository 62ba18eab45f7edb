"""For tests of providers: their contract, faults for an emulated API, and simulated GPUs."""

from skyward.testing.contract import ProviderContract
from skyward.testing.faults import Call, Fault, Faults
from skyward.testing.gpus import nvidia_smi

__all__ = ["Call", "Fault", "Faults", "ProviderContract", "nvidia_smi"]
