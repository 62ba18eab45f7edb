"""The pool: opens things in order, closes them in reverse, and sends calls to nodes."""

from skyward.pool.pool import ComputePool, plan

__all__ = ["ComputePool", "plan"]
