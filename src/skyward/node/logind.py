"""Whether systemd ends a user's processes at logout; as a program, by exit status."""

from __future__ import annotations

import getpass
import os
import re
import sys
from pathlib import Path

__all__ = ["ends_at_logout"]


def ends_at_logout(root: Path = Path("/")) -> bool:
    """`setup/env/scripts/check.sh` asks hosts the same."""
    if not (root / "run/systemd/system").is_dir() or os.geteuid() == 0:  # root's processes are exempt by default
        return False
    folders = [root / "usr/lib/systemd", root / "etc/systemd"]
    files = [folder / "logind.conf" for folder in folders]
    files += [path for folder in folders for path in sorted((folder / "logind.conf.d").glob("*.conf"))]
    texts = "\n".join(path.read_text(errors="replace") for path in files if path.is_file())
    told = re.findall(r"^KillUserProcesses=(\S+)", texts, re.MULTILINE)
    kills = bool(told) and told[-1].lower() in ("yes", "true", "on", "1")
    return kills and not (root / "var/lib/systemd/linger" / getpass.getuser()).exists()


if __name__ == "__main__":
    sys.exit(ends_at_logout())
