"""Whether words can be read on a colour: the contrast of two colours, as WCAG 2 defines it."""

from __future__ import annotations

__all__ = ["contrast"]


def contrast(one: str, other: str) -> float:
    """From 1 (the same) to 21 (black on white); colours as `#rrggbb`."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
