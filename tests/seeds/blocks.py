"""The code blocks of the documents that Skyward was built from, where these are at hand.

They are no part of the repository. They are looked for in the directory that SKYWARD_SEEDS names, or else in
`shared/seeds` beside the checkout.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ABSENT", "Block", "blocks", "checklist", "directory"]

ABSENT = "the documents are not at hand; name their directory in SKYWARD_SEEDS"
_ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One code block, by its document and its number there."""

    document: str
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Such as "S0.7": what it is called in `fillings` and in test ids."""
        return f"{self.document}.{self.number}"


def directory() -> Path | None:
    """Where the documents are, if they are."""
    found = Path(os.environ.get("SKYWARD_SEEDS") or _ROOT.parent / "shared" / "seeds")
    return found if found.is_dir() else None


def blocks() -> list[Block]:
    """All blocks, in order; none where the documents are not at hand."""
    found = directory()
    return [block for page in sorted(found.glob("S*.md")) for block in _of(page)] if found else []


def checklist() -> str | None:
    """The list of what the documents promise, which lies beside them."""
    found = directory()
    path = found.parent / "checklist.md" if found else None
    return path.read_text() if path and path.is_file() else None


def _of(page: Path) -> list[Block]:
    document = page.name.partition("-")[0]
    found = _FENCE.finditer(page.read_text())
    return [Block(document, number, match["language"], match["text"]) for number, match in enumerate(found, 1)]
