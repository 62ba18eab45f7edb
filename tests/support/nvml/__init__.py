"""A stand-in for NVIDIA's NVML: a real shared library with recorded answers, for the product's own code to load."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["A100_40", "H200", "FakeCard", "FakeNvml"]

_SOURCE = Path(__file__).with_name("nvml.c")


@dataclass
class FakeCard:
    """A GPU as NVML tells of it; None is what it does not support. `slices` are the UUID, name and bytes of each."""

    uuid: str
    name: str
    total: int
    used: int = 0
    use: int | None = 0
    temperature: int | None = 40
    milliwatts: int | None = 100_000
    slowdowns: int = 0
    errors: int | None = 0
    status: int = 0
    slices: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])

    def lines(self) -> list[str]:
        """Its part of the file that the library reads."""
        figures = [self.total, self.used, self.use, self.temperature, self.milliwatts, self.slowdowns, self.errors]
        own = "|".join("-" if figure is None else str(figure) for figure in figures)
        parts = [f"M|{uuid}|{name}|{size}|{1 << 20}" for uuid, name, size in self.slices]
        return [f"G|{self.uuid}|{self.name}|{own}|{self.status}", *parts]


def H200(number: int = 0, **figures: int | None) -> FakeCard:
    """An H200, as driver 570 tells of it."""
    return FakeCard(f"GPU-{number}aa00000-0000", "NVIDIA H200", 143771 << 20, **figures)  # type: ignore[arg-type]


def A100_40(number: int = 0, slices: int = 0) -> FakeCard:
    """An A100 with 40 GB, in so many slices of 1g.5gb; NVML does not tell the use of a card with slices."""
    name = "NVIDIA A100-SXM4-40GB"
    parts = [(f"MIG-{number}-{part}", f"{name} MIG 1g.5gb", 4864 << 20) for part in range(slices)]
    return FakeCard(f"GPU-{number}bb00000-0000", name, 40960 << 20, use=None if slices else 0, slices=parts)


class FakeNvml:
    """The library in a directory; `show` says what it answers from now on, to every process that has loaded it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        self.library = directory / "libnvidia-ml.so.1"
        self._answers = directory / f"{self.library.name}.answers"
        argv = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self.library), str(_SOURCE)]
        subprocess.run(argv, check=True, capture_output=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(directory))

    def show(self, *cards: FakeCard, xid: tuple[int, int] | None = None, hang: bool = False) -> None:
        """Replaces the answers."""
        lines = [line for card in cards for line in card.lines()]
        lines += [f"X|{xid[0]}|{xid[1]}"] if xid else []
        new = self._answers.with_suffix(".new")
        new.write_text("\n".join([*lines, *(["hang"] if hang else [])]) + "\n")
        new.replace(self._answers)
