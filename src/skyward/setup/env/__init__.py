"""Makes the environment that an image describes, with uv: on this computer and on hosts."""

__all__: list[str] = []
