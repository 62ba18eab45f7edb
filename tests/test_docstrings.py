"""`help(...)` of what users call explains every parameter, with its default."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky

# what only Skyward makes: users hold these, and their constructors are not for them
MADE_BY_US = {
    "Compute",
    "History",
    "InstanceInfo",
    "Once",
    "PendingCompute",
    "PendingComputeGroup",
    "Preempted",
    "Ref",
    "Stream",
    "Transfer",
}
MADE_BY_US |= {name for name in sky.__all__ if name.startswith("Shared")}
# their docstrings have a section `Args:`, in which defaults are said, too
EXPLAINED = (
    "AWS",
    "ComputePool",
    "Image",
    "Machine",
    "Offer",
    "PipIndex",
    "Plugin",
    "SSH",
    "Spec",
    "Worker",
    "compute",
)


def public() -> Iterator[tuple[str, Any]]:
    for name in sorted({*sky.__all__, "dict", "set"}):
        value = getattr(sky, name)
        if inspect.ismodule(value):
            continue
        if name not in MADE_BY_US:
            yield name, value
        if inspect.isclass(value):
            yield from methods(name, value)
    for module in (sky.plugins, sky.integrations):
        short = module.__name__.removeprefix("skyward.")
        yield from ((f"{short}.{name}", getattr(module, name)) for name in module.__all__)


def methods(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    for attribute in dir(kind):
        found = inspect.getattr_static(kind, attribute)
        found = getattr(found, "__func__", found)
        inherited = issubclass(kind, sky.Provider) and kind is not sky.Provider and hasattr(sky.Provider, attribute)
        ours = inspect.isfunction(found) and found.__module__.startswith("skyward.") and found.__doc__ is not None
        if ours and not attribute.startswith("_") and not inherited and attribute != "from_json":
            yield f"{name}.{attribute}", found


def parameters(value: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    refused = [p.name for p in found if "Never" in str(p.annotation)]  # there to be answered with the right spelling
    return [p for p in found if p.name not in ("self", "cls", *refused) and not p.name.startswith("_")]


CALLABLES = dict(public())


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_is_named_in_the_docstring(name: str) -> None:
    doc = inspect.getdoc(CALLABLES[name]) or ""
    assert [p.name for p in parameters(CALLABLES[name]) if not re.search(rf"(?<![\w.]){p.name}(?!\w)", doc)] == []


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_parameter_is_explained_with_its_default(name: str) -> None:
    value = CALLABLES[name]
    _, _, section = (inspect.getdoc(value) or "").partition("\nArgs:\n")
    entries = dict(re.findall(r"^    \*?(\w+): (.+?)(?=\n    \*?\w+: |\n\n|\Z)", section, re.M | re.S))
    assert list(entries) == [p.name for p in parameters(value)], "in the order of the signature"
    for parameter in parameters(value):
        text, default = " ".join(entries[parameter.name].split()), parameter.default
        if default is parameter.empty or parameter.name == "fn":
            continue
        assert "efault" in text, parameter.name
        if isinstance(default, str | int | float) and default not in ("", False, True) and len(str(default)) < 20:
            shown = (
                f'"{default}"' if isinstance(default, str) else f"{default:g}" if default < 1e5 else f"{default:.0f}"
            )
            assert shown in text, (parameter.name, shown)


def test_the_names_of_the_module_are_those_for_users() -> None:
    shown = set(dir(sky))
    assert shown == {*sky.__all__, "__version__", "dict", "set"}
    assert {"os", "import_module", "TYPE_CHECKING"} & shown == set()
