"""The pool: opens things in order, closes them in reverse, and sends calls to nodes."""

__all__: list[str] = []
