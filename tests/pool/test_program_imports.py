"""What a detached program imports: found without running it, looked up where it is going to run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import cloudpickle
import pytest

from skyward.api.shell import Finished
from skyward.errors import InvalidArgument
from skyward.pool.program_imports import check, of_function, of_program


def found(tmp_path: Path, **files: str) -> dict[str, bool]:
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
    return {each.package: each.needed for each in of_program(tmp_path / "train.py")}


def test_what_a_program_imports_whatever_happens_is_needed(tmp_path: Path) -> None:
    source = """
        import pandas.io, os
        from numpy import linalg
        with open("x"):
            import scipy
        class A:
            import polars
        if __name__ == "__main__":
            import rich
        """
    assert found(tmp_path, train=source) == dict.fromkeys(["pandas", "os", "numpy", "scipy", "polars", "rich"], True)


def test_what_a_program_can_do_without_is_not_looked_up(tmp_path: Path) -> None:
    source = """
        import sys
        try:
            import ujson
        except ImportError:
            import simplejson
        if sys.platform == "win32":
            import winreg
        """
    assert found(tmp_path, train=source) == {"sys": True}


def test_a_call_needs_what_it_imports_and_another_function_may(tmp_path: Path) -> None:
    source = """
        import skyward as sky
        @sky.compute
        def train():
            import torch
        @sky.compute(timeout=3)
        def evaluate():
            import jax
        def plot():
            import matplotlib
        """
    assert found(tmp_path, train=source) == {"skyward": True, "torch": True, "jax": True, "matplotlib": False}


def test_modules_beside_the_program_are_followed(tmp_path: Path) -> None:
    files = {
        "train": "import helper\nfrom lab.models import Net",
        "helper": "import pandas\nimport train\nif __name__ == '__main__':\n    import click",
        "lab/__init__": "from . import data",
        "lab/data": "from .. import nothing\nimport polars",
        "lab/models": "from .data import load\nimport torch",
        "lab/other": "import never",
    }
    assert found(tmp_path, **files) == dict.fromkeys(["pandas", "polars", "torch"], True)


def test_a_file_that_is_no_python_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"helper\.py, line 2: .*The run would end with that"):
        found(tmp_path, train="import helper", helper="\nx = = 3")


class Here:
    """A shell of this computer."""

    name = "host"

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        done = subprocess.run(argv, input=data, capture_output=True, timeout=timeout, check=False)
        return Finished(done.returncode, done.stdout, done.stderr.decode())


def looked_up(tmp_path: Path, source: str, path: Sequence[str] = ()) -> list[str]:
    (tmp_path / "train.py").write_text(source)
    return check(Here(), sys.executable, of_program(tmp_path / "train.py"), path)  # type: ignore[arg-type]


def test_what_the_nodes_do_not_have_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        looked_up(tmp_path, "import os, numpy\nimport nowhere.to.be_found")
    assert str(caught.value) == (
        "train.py, line 2, imports nowhere, which the nodes do not have: add it to Image(pip=['nowhere'])."
    )


def test_what_may_be_needed_is_a_warning(tmp_path: Path) -> None:
    (text,) = looked_up(tmp_path, "import numpy\ndef plot():\n    import nowhere")
    assert "train.py, line 3, imports nowhere" in text
    assert "if that function is called" in text


def test_modules_of_the_path_are_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "aside.py").write_text("raise SystemExit('it is not run')")
    assert looked_up(tmp_path, "import aside", [str(tmp_path / "other")]) == []


class Lacking:
    def __init__(self, rates: Mapping[str, Any]) -> None:
        self.rates = rates


def test_the_pickle_of_a_function_names_what_it_imports_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import json, numpy, pathlib
        import beside
        class Config:
            def __init__(self): self.path = pathlib.Path("x")
        def work(config=Config()):
            return beside.value, numpy.zeros(3), config, {1: [Config()], (2,): {3}}
        """
    (tmp_path / "beside.py").write_text("import pickletools\nvalue = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(dedent(source), space)
    modules = {each.package for each in of_function(cloudpickle.dumps((space["work"], Lacking({"a": 1}))), tmp_path)}
    assert {"numpy", "pathlib", "pickletools", "tests"} <= modules
    assert "json" not in modules
    sys.modules.pop("beside")
