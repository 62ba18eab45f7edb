"""One file a provider; the file's name is its registration."""

from skyward.providers.local import Local

__all__ = ["Local"]
