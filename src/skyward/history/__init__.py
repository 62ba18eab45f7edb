"""What happened in pools, kept on this computer."""

__all__: list[str] = []
