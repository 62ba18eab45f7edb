"""What users write and read: values that are checked when made. No I/O."""

__all__: list[str] = []
