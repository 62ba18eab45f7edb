"""One file a provider; the file's name is its registration."""

from skyward.providers.aws.provider import AWS
from skyward.providers.local import Local
from skyward.providers.ssh import SSH

__all__ = ["AWS", "SSH", "Local"]
