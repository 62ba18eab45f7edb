"""The live page: a pool in the browser, read from its history."""

__all__: list[str] = []
