"""What is advised about a module that a node lacks: the package's name, as installed here or as known."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from skyward.client import outcomes
from skyward.client.outcomes import missing_module


@pytest.fixture(autouse=True)
def nothing_is_known_yet() -> Iterator[None]:
    """What is installed here is found out once in a process."""
    outcomes._installed.cache_clear()
    yield
    outcomes._installed.cache_clear()


def test_what_is_installed_here_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a file of every package: for each of a thousand failed calls, that takes longer than they do."""
    found: list[dict[str, list[str]]] = []
    monkeypatch.setattr(metadata, "packages_distributions", lambda: found.append({}) or found[0])
    for module in ("sklearn", "cv2", "no_such_module_anywhere", "cv2"):
        missing_module(module)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("module", "package"),
    [("sklearn", "scikit-learn"), ("cv2", "opencv-python-headless"), ("PIL", "pillow"), ("yaml", "pyyaml")],
)
def test_the_advice_names_the_package_and_not_the_module(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    """S0_9: `pip install sklearn` fails to build."""
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    assert f"pip=['{package}']" in missing_module(module)


def test_what_is_installed_here_counts_before_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"cv2": ["opencv-contrib-python"], "google": ["protobuf", "google-auth"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: installed)
    assert "pip=['opencv-contrib-python']" in missing_module("cv2")
    assert "protobuf" not in missing_module("google")


def test_a_framework_is_advised_as_a_plugin_with_its_package() -> None:
    advice = missing_module("sklearn")
    assert "sky.plugins.sklearn()" in advice
    assert "scikit-learn" in advice


def test_an_unknown_module_is_advised_with_a_doubt() -> None:
    assert "may have another name" in missing_module("no_such_module_anywhere")


def test_a_module_of_this_computer_is_to_be_imported_outside_of_the_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "at the top of your file and not in the function" in missing_module("only_here")
