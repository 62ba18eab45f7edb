"""The test cloud: an AWS on this computer that misbehaves on demand. It is not part of the package."""

from tests.support.cloud.cloud import Cloud
from tests.support.cloud.machines import Hooks, Instance, NoticeHooks

__all__ = ["Cloud", "Hooks", "Instance", "NoticeHooks"]
