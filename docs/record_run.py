"""Runs a session with a detached run in a pseudo-terminal, and draws it as an animated SVG.

python docs/record_run.py [--output docs/detached-run.svg]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from record_view import Screen, play, svg

__all__ = ["animation", "record"]

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 100, 20
PROMPT = "\x1b[1m$\x1b[0m "
SECONDS, LAST = 2.2, 6.0  # how long a frame is shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "detached-run.svg")
    options = parser.parse_args()
    options.output.write_text(animation(record(), "a run that outlives its terminal"))
    print(f"wrote {options.output}")


def record() -> list[list[str]]:
    """Screens (lines with ANSI colours) of one session, in order."""
    with tempfile.TemporaryDirectory(prefix="skyward-recorded-") as folder:
        shutil.copy(ROOT / "examples" / "guides" / "31_detached_runs.py", Path(folder, "train.py"))
        session = _Session(folder)
        session.run("sky run --detach --name grid train.py -- 60")
        session.frame()
        session.run("sky attach grid", at=("epoch 1:", "epoch 4:"), leave=True)
        session.frame()
        session.run("sky runs")
        session.frame()
        session.run("sky attach grid", at=("epoch 9:",), leave=True)
        session.run("sky fetch grid")
        session.run("sky stop grid")
        session.frame()
        return session.frames


class _Session:
    def __init__(self, folder: str) -> None:
        self.frames: list[list[str]] = []
        self._folder, self._screen = folder, Screen(COLUMNS, LINES)
        Path(folder, "state").mkdir(mode=0o700)

    def frame(self) -> None:
        self.frames.append(self._screen.ansi())

    def run(self, command: str, at: tuple[str, ...] = (), leave: bool = False) -> None:
        """Draws a frame whenever one of these texts and the view are there; leaves with Ctrl-C after the last."""
        self._screen.feed(f"{PROMPT}{command}\r\n".encode())
        left = list(at)

        def look(data: bytes, terminal: int) -> None:
            text = self._screen.text()
            shown = any(line.startswith("●") and "train" in line for line in text)
            if left and shown and self._screen.cursor_shown and any(line.startswith(left[0]) for line in text):
                left.pop(0)
                self.frame()
                if leave and not left:
                    os.write(terminal, b"\x03")

        environment = f"SKYWARD_STATE={self._folder}/state"
        words = command.split()
        argv = [
            "setsid",
            "--ctty",
            "--wait",
            "env",
            "-C",
            self._folder,
            environment,
            sys.executable,
            "-m",
            "skyward",
            *words[1:],
        ]
        status = play(argv, self._screen, look)
        if left or status not in (0, 130):
            sys.exit(f"{command} ended with status {status}:\n" + "\n".join(self._screen.everything()))


def animation(frames: list[list[str]], title: str) -> str:
    """Pictures of the frames in one file, each shown for its time, again and again."""
    lines = max(map(len, frames))
    total = SECONDS * (len(frames) - 1) + LAST
    parts, styles, began = list[str](), list[str](), 0.0
    for number, frame in enumerate(frames):
        ended = began + (SECONDS if number < len(frames) - 1 else LAST)
        start, end = (f"{100 * when / total:.2f}%" for when in (began, ended))
        hidden = "" if number == 0 else "0%{opacity:0}"
        styles.append(f"@keyframes shown-{number}{{{hidden}{start}{{opacity:1}}{end}{{opacity:0}}}}")
        styles.append(f".frame-{number}{{animation:shown-{number} {total:g}s step-end infinite}}")
        drawn = svg([*frame, *[""] * (lines - len(frame))], COLUMNS, title)
        drawn = re.sub(r"terminal-\d+", f"terminal-{number}", drawn)  # in one file, names are used once
        parts.append(f'<g class="frame-{number}">{drawn}</g>')
        began = ended
    box = re.search(r'viewBox="([^"]*)"', parts[0])
    assert box is not None
    still = "@media (prefers-reduced-motion: reduce){[class^=frame]{animation:none!important;opacity:0}"
    styles.append(f"{still}.frame-{len(frames) - 1}{{opacity:1}}}}")
    return f'<svg viewBox="{box[1]}" xmlns="http://www.w3.org/2000/svg"><style>{"".join(styles)}</style>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    main()
