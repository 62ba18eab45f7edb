"""A picture of what a browser shows, as a small PNG in docs/pictures; the record_* programs use it."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

__all__ = ["LIMIT", "PICTURES", "ROOT", "photograph"]

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
LIMIT = 200_000  # bytes: a picture that a page can show without a thought
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for the browser, which tests use too


def photograph(driver: Any, name: str, height: int | None = None, folder: Path = PICTURES) -> Path:
    """Writes what the window shows, its upper `height` pixels if given, with as many colours as look the same."""
    from PIL import Image

    shown = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    if height is not None:
        shown = shown.crop((0, 0, shown.width, min(shown.height, height)))
    folder.mkdir(exist_ok=True)
    path = folder / name
    shown.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > LIMIT:
        raise SystemExit(f"{path} has {path.stat().st_size:,} bytes, more than {LIMIT:,}: take a smaller window.")
    print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")
    return path
