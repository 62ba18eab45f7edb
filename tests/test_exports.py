"""What `import skyward` gives, and what it leaves alone."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import skyward

# these import a framework at their top, or are programs; they are imported on use only
NEEDS_FRAMEWORK = {"skyward.plugins._joblib_backend", "skyward.__main__"}
MODULES = sorted(m.name for m in pkgutil.walk_packages(skyward.__path__, "skyward.") if m.name not in NEEDS_FRAMEWORK)


def test_all_is_exactly_what_can_be_imported_and_what_type_checkers_see() -> None:
    tree = ast.parse(Path(skyward.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    modules = {name for name, module in seen.items() if module == "skyward"}
    assert {name: module for name, module in seen.items() if module != "skyward"} == skyward._HOMES
    assert modules == set(skyward._MODULES)
    shadowing = {"dict", "set"}  # `from skyward import *` must leave the built-in ones alone
    assert set(seen) - shadowing == set(skyward.__all__)
    assert set(dir(skyward)) == {*seen, "__version__"}
    for name, module in seen.items():
        expected = (
            importlib.import_module(f"skyward.{name}")
            if name in modules
            else getattr(importlib.import_module(str(module)), name)
        )
        assert getattr(skyward, name) is expected


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'computer'"):
        _ = skyward.computer  # type: ignore[attr-defined]
    assert not hasattr(skyward, "api_")


def test_importing_loads_nothing_of_skyward_but_what_is_used() -> None:
    """What runs on nodes imports parts of the package; each part loads what it needs, not everything."""
    source = (
        "import sys, skyward; loaded = {n for n in sys.modules if 'skyward' in n}; skyward.instance_info; "
        "print(loaded, 'skyward.pool.pool' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=180)
    assert out.stdout == "{'skyward'} False\n"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_is_public_and_has_it(name: str) -> None:
    module = importlib.import_module(name)
    assert isinstance(module.__all__, list)
    assert len(module.__all__) == len(set(module.__all__))
    assert module.__doc__
    for public in module.__all__:
        assert hasattr(module, public), public


def test_importing_loads_no_framework_and_nothing_heavy() -> None:
    """S0-03, and more: what takes long to import is imported where it is used."""
    heavy = (
        "distributed dask rich numpy pandas torch jax keras tensorflow transformers joblib sklearn cryptography boto3 "
        "psutil packaging tornado yaml asyncssh"
    ).split()
    source = f"import json, sys; from skyward import *; print(json.dumps([n for n in {heavy} if n in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=180)
    assert json.loads(out.stdout) == []
    assert out.stderr == ""


def test_the_dispatch_target_and_the_module_are_both_there() -> None:
    """D6: the module itself and a `sky` singleton."""
    assert repr(skyward.sky) == "sky"
    assert skyward.integrations.sklearn_backend is skyward.integrations.joblib_backend
    assert {"torch", "jax", "keras", "huggingface", "joblib", "sklearn"} <= set(skyward.plugins.__all__)


def test_the_version_is_written_once_and_is_the_newest_one_of_the_changes() -> None:
    root = Path(__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert root / settings["tool"]["hatch"]["version"]["path"] == Path(skyward.__file__)
    headings = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(skyward.__version__)} \(\d{{4}}-\d\d-\d\d\)", headings[1])


def test_nothing_deprecated_outlives_the_version_of_its_removal() -> None:
    now = [int(part) for part in skyward.__version__.split(".")]
    for file in Path(skyward.__file__).parent.rglob("*.py"):
        for removal in re.findall(r'removal="([\d.]+)"', file.read_text()):
            assert now < [int(part) for part in removal.split(".")], f"{file}: it was to go in {removal}"
