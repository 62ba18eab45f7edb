"""How a file is received on a machine: the script that runs there, and what is said if that fails."""

from __future__ import annotations

from skyward.api.shell import Finished
from skyward.errors import BootstrapError

__all__ = ["RECEIVE", "not_copied"]

# The end of a broken connection looks like the end of the file: hence the size, and no signal that comes with it.
RECEIVE = (
    'umask 077; trap "" HUP PIPE; cat > "$2" && '
    '{ test "$(wc -c < "$2")" -eq "$3" || { echo "cut short" >&2; false; }; } && '
    'mv -f -- "$2" "$1" && exit 0; code=$?; rm -f -- "$2"; exit "$code"'
)
_REASONS = {
    "No space left": "the disk there is full. Free some space, or set SKYWARD_CACHE there to a directory on another.",
    "quota exceeded": "the user's share of the disk there is used up. Free some space, or ask for more.",
    "Read-only file system": "the disk there cannot be written to. Set SKYWARD_CACHE there to a directory on another.",
    "Permission denied": "the user may not write there. Choose a directory of the user's own.",
    "nonexistent": "the directory does not exist there.",
    "No such file": "the directory does not exist there.",
    "cut short": "not all of it arrived: the file changed while it was read, or the connection broke. Try again.",
}


def not_copied(name: str, dest: str, done: Finished) -> BootstrapError:
    """Why a file did not arrive."""
    why = next((words for sign, words in _REASONS.items() if sign in done.err), "")
    return BootstrapError(f"copying to {name}:{dest}", f"{why}\n{done.err}".strip(), None, done.code)
