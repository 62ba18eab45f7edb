"""What users write and read: values that are checked when they are made. No I/O."""

__all__: list[str] = []
