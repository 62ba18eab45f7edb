"""What happened in pools, kept on this computer: written while a pool is open, read by commands, pages and programs."""

__all__: list[str] = []
