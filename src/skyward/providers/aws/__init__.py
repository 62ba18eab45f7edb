"""Machines from EC2; `provider.py` puts the parts together."""

from skyward.providers.aws.provider import AWS

__all__ = ["AWS"]
