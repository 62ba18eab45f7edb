"""What is advised about a module that a node lacks: the package's name, as installed here or as known."""

from __future__ import annotations

from importlib import metadata

import pytest

from skyward.client.outcomes import missing_module


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
