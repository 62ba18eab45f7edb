"""A cloud that misbehaves on demand, to test programs that use Skyward without an account or a bill."""

from skyward.testing.cloud import Cloud
from skyward.testing.faults import Call, Fault
from skyward.testing.machines import Hooks, Instance, NoticeHooks

__all__ = ["Call", "Cloud", "Fault", "Hooks", "Instance", "NoticeHooks"]
