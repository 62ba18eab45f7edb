"""What a person sees of a pool: the live view on a terminal, plain lines elsewhere."""

__all__: list[str] = []
