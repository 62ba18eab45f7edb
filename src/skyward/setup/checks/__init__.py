"""What would go wrong on hosts, found out before a pool is opened there; nothing is changed on them."""

__all__: list[str] = []
