"""From machines to nodes that take calls: shells, environments, keepers, addresses."""

__all__: list[str] = []
