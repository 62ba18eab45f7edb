"""Programs that tests start or load."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["USUAL_SIGNALS", "load_program"]

# As in a terminal, even where the test run was started to ignore them; by a program, since the tests have threads.
USUAL_SIGNALS = ["env", "--default-signal=INT,HUP,TERM"]


def load_program(path: Path) -> Any:
    """A program as a module of its own name, found there by what is unpickled later."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
