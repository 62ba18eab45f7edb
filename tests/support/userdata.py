"""The user data of machines, as it is checked in seconds and as it is booted for real: one text, kept in a file.

    provider ──launch──► test cloud ──user data──► check() ── tests/providers/aws/test_first_boot.py: schema, units
                                                     └─────── tests/vm: Ubuntu boots with it

Whatever passes `check` is the text in user_data.txt but for keys and numbers of seconds. So neither side can test a
text that the other has not seen.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["check", "keep", "normal", "settings"]

_KEPT = Path(__file__).with_name("user_data.txt")
_SECONDS = r"(lease=|life=|--on-active=|renewed its lease for |when it is |  sleep )\d+"


def settings(text: str) -> dict[str, Any]:
    """What user data says, as cloud-init reads it."""
    head, _, body = text.partition("\n")
    assert head == "#cloud-config", "cloud-init knows its settings by their first line"
    return json.loads(body)


def normal(text: str) -> str:
    """User data for people to read, without what differs from pool to pool."""
    told = settings(text)
    told["ssh_keys"] = dict.fromkeys(told["ssh_keys"], "KEY")
    (command,) = told.pop("bootcmd")
    script = re.sub(_SECONDS, r"\1SECONDS", command[-1])
    return f"{json.dumps(told, indent=1)}\n\nbootcmd, one command: {command[:-1]} and this:\n\n{script}"


def keep(text: str) -> None:
    """Makes this the user data that all tests are about."""
    _KEPT.write_text(normal(text))


def check(text: str) -> None:
    """Fails if this is not the user data that all tests are about."""
    assert normal(text) == _KEPT.read_text(), (
        f"the user data of machines is not what {_KEPT.name} has. If it was changed on purpose: run "
        "`SKYWARD_GOLDEN=1 pytest tests/providers/aws/test_first_boot.py`, and `make test-vm`, which boots it."
    )
