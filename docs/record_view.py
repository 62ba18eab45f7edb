"""Runs a script in a pseudo-terminal and draws its screen, at the busiest moment of the live view, as an SVG.

python docs/record_view.py [--output docs/live-view.svg] [script arguments ...]
"""

from __future__ import annotations

import argparse
import codecs
import errno
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

__all__ = ["Screen", "play", "record", "svg"]

ROOT = Path(__file__).resolve().parent.parent
FRAME_END = re.compile(rb"(?<=\x1b\[\?25h)")  # the view shows the cursor again at the end of each frame
SEQUENCE = re.compile(r"\x1b\[([0-?]*)([ -/]*)([@-~])|\x1b([78D])|(\r\n|[\r\n\t\b])|([^\x00-\x1f\x7f])", re.DOTALL)


def main() -> None:
    """Record the script named on the command line; the demo unless told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "live-view.svg")
    parser.add_argument("--size", type=int, nargs=2, default=(92, 22), metavar=("COLUMNS", "LINES"))
    parser.add_argument("script", nargs="*", default=[str(ROOT / "examples" / "hello_nodes.py")])
    options = parser.parse_args()
    columns, lines = options.size
    best, status = record([sys.executable, *options.script], columns, lines)
    if status != 0 or best is None:
        sys.exit(
            f"{options.script[0]} ended with status {status} and {'no' if best is None else 'a'} view on the screen."
        )
    options.output.write_text(svg(best, columns, f"python {Path(options.script[0]).name}"))
    print(f"wrote {options.output}")


def record(command: list[str], columns: int, lines: int) -> tuple[list[str] | None, int]:
    """The screen (lines with ANSI colours) when most nodes were busy, as late as possible, and the exit status."""
    screen, best, most = Screen(columns, lines), None, 0

    def look(data: bytes, terminal: int) -> None:
        nonlocal best, most
        busy = sum(line.startswith("●") for line in screen.text())
        if screen.cursor_shown and busy and busy >= most:
            best, most = screen.ansi(), busy

    status = play(command, screen, each=look)
    return best, status


def play(command: list[str], screen: Screen, each: Callable[[bytes, int], None], limit: float = 120.0) -> int:
    """Run the command on a terminal shown by `screen`; `each` sees what is written, and may write to the terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    terminal, inner = pty.openpty()
    termios.tcsetwinsize(inner, (screen.lines, screen.columns))
    process = subprocess.Popen(
        command,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=environment | {"TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(inner)
    deadline = time.monotonic() + limit
    try:
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0] and (data := _read(terminal)):
            for piece in re.split(FRAME_END, data):
                screen.feed(piece)
                each(piece, terminal)
        return process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def svg(lines: list[str], columns: int, title: str) -> str:
    """A picture of the lines in a window."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi("\n".join(lines)), no_wrap=True, crop=False)
        drawn = console.export_svg(title=title)
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # nothing to be fetched from elsewhere


class Screen:
    """As much of a terminal as the live view uses, with colours and what has scrolled off the top."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.history: list[str] = []
        self.cursor_shown = self.wraps = True
        self.row = self.column = 0
        self._style = ""
        self._saved = (0, 0, "")
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._cells = [self._blank() for _ in range(lines)]

    def feed(self, data: bytes) -> None:
        """Take what was written to the terminal."""
        text = self._rest + self._decoder.decode(data)
        position, self._rest = 0, ""
        while position < len(text):
            found = SEQUENCE.match(text, position)
            if found is None:
                if text[position] == "\x1b" and len(text) - position < 16:
                    self._rest = text[position:]
                    return
                position += 1
                continue
            position = found.end()
            arguments, _, final, escape, control, character = found.groups()
            if character:
                self._put(character)
            elif control:
                self._control(control)
            elif escape:
                self._escape(escape)
            else:
                self._sequence(arguments, final)

    def text(self) -> list[str]:
        """The lines on the screen, without colours."""
        return [_characters(row).rstrip() for row in self._cells]

    def everything(self) -> list[str]:
        """All lines ever shown that were not erased, without the empty ones at the end."""
        lines = [*self.history, *self.text()]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def ansi(self) -> list[str]:
        """The lines on the screen with their colours, without empty ones at the ends."""
        lines = [
            "".join(f"\x1b[0{style}m{_characters(cells)}" for style, cells in groupby(row, itemgetter(1)))
            for row in self._cells
        ]
        shown = [i for i, line in enumerate(self.text()) if line]
        return lines[shown[0] : shown[-1] + 1] if shown else []

    def _blank(self) -> list[tuple[str, str]]:
        return [(" ", "")] * self.columns

    def _put(self, character: str) -> None:
        width = cell_len(character)
        if width == 0:
            return
        if self.column + width > self.columns:
            if not self.wraps:
                return
            self.column = 0
            self._down()
        self._cells[self.row][self.column : self.column + width] = [(character, self._style)] + [("", "")] * (width - 1)
        self.column += width

    def _control(self, control: str) -> None:
        if "\r" in control:
            self.column = 0
        if "\n" in control:
            self._down()
        if control == "\t":
            self.column = min(self.columns - 1, self.column // 8 * 8 + 8)
        if control == "\b":
            self.column = max(0, self.column - 1)

    def _escape(self, escape: str) -> None:
        if escape == "D":
            self._down()
        elif escape == "7":
            self._saved = (self.row, self.column, self._style)
        else:
            self.row, self.column, self._style = self._saved

    def _sequence(self, arguments: str, final: str) -> None:
        if final == "m":
            self._style = "" if arguments in ("", "0") else f"{self._style};{arguments}"
        elif final == "A":
            self.row = max(0, self.row - int(arguments or 1))
        elif final in "JK":
            start = 0 if arguments == "2" else self.column
            self._cells[self.row][start:] = self._blank()[start:]
            for row in range(self.row + 1, self.lines if final == "J" else 0):
                self._cells[row] = self._blank()
        elif arguments in ("?25", "?7"):
            setattr(self, "cursor_shown" if arguments == "?25" else "wraps", final == "h")
        else:
            raise ValueError(
                f"this terminal does not know the sequence {arguments}{final}; the view should not use it."
            )

    def _down(self) -> None:
        if self.row < self.lines - 1:
            self.row += 1
            return
        self.history.append(_characters(self._cells[0]).rstrip())
        del self._cells[0]
        self._cells.append(self._blank())


def _characters(cells: Iterable[tuple[str, str]]) -> str:
    return "".join(character for character, _ in cells)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError as error:  # how Linux says that the other side is closed
        if error.errno != errno.EIO:
            raise
        return b""


if __name__ == "__main__":
    main()
