"""Errors cross processes: each class keeps its fields and its message."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from skyward import errors

EXAMPLES: dict[str, tuple[Any, ...]] = {
    "AuthenticationFailed": ("connecting", "no key fits", 0, 255),
    "BootstrapError": ("pip", "no such package", 2, 1),
    "HostKeyMismatch": ("connecting", "another key", 1, 255),
    "HostUnreachable": ("connecting", "no answer", 2, 255),
    "NodeDiskFull": ("train", 1, 50_000_000, "No space left on device"),
    "NodeLost": (1, "train", "its agent was restarted", 3),
    "PluginError": ("torch", "around_app", "no route", 2),
    "PythonMismatch": ("python", "3.11 here, 3.12 there", 0, None),
    "RemoteError": ("mod.Error", "it broke", "Traceback ..."),
    "ResultTooLarge": ("train", 3_000_000, 1_000_000),
    "TaskCrashed": ("train", 1, 2, -11, "SIGSEGV", "last words", 3),
    "TaskOutOfMemory": ("train", 1, 0, -9, "SIGKILL", "", 0),
    "TaskTimeout": ("train", 1, 2.5, 1, True),
}


def every_class() -> list[type[Exception]]:
    return [getattr(errors, name) for name in errors.__all__]


def example(kind: type[Exception]) -> Exception:
    return kind(*EXAMPLES.get(kind.__name__, ("a sentence that says what to do.",)))


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[Exception]) -> None:
    error = example(kind)
    error.add_note("a note")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert again.args == error.args
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)
def test_every_field_is_an_argument_and_an_attribute(kind: type[Exception]) -> None:
    if kind.__name__ not in EXAMPLES:
        assert vars(example(kind)) == {}
        return
    names = list(inspect.signature(kind).parameters)
    assert vars(example(kind)) == dict(zip(names, EXAMPLES[kind.__name__], strict=True))


def test_all_have_one_base_and_are_listed() -> None:
    found = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert found == set(errors.__all__)
    assert all(issubclass(kind, errors.SkywardError) for kind in every_class())
    assert all(name in (errors.__doc__ or "") for name in errors.__all__), "the tree in the docstring is complete"


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("InvalidArgument", ValueError),
        ("PoolClosed", RuntimeError),
        ("ForkedPoolError", RuntimeError),
        ("NestedPoolError", RuntimeError),
        ("NotSerializable", TypeError),
        ("ResultNotSerializable", errors.NotSerializable),
        ("TaskTimeout", TimeoutError),
        ("TaskOutOfMemory", errors.TaskCrashed),
        ("NodeLost", errors.TaskError),
        ("PythonMismatch", errors.BootstrapError),
    ],
)
def test_each_is_also_what_callers_would_expect(kind: str, also: type[Exception]) -> None:
    assert issubclass(getattr(errors, kind), also)


def test_messages_name_what_happened_where_and_what_to_do() -> None:
    said = {name: str(example(getattr(errors, name))) for name in EXAMPLES}
    assert "SIGSEGV" in said["TaskCrashed"]
    assert "node 1" in said["TaskCrashed"]
    assert "last words" in said["TaskCrashed"]
    assert "3 other calls" in said["TaskCrashed"]
    assert 'executor="process"' in said["TaskCrashed"]
    assert "memory" in said["TaskOutOfMemory"]
    assert "2.5 s" in said["TaskTimeout"]
    assert "with_timeout" in said["TaskTimeout"]
    assert "was killed" in said["TaskTimeout"]
    assert "3,000,000" in said["ResultTooLarge"]
    assert "max_result_bytes" in said["ResultTooLarge"]
    assert "3 times" in said["NodeLost"]
    assert "retries" in said["NodeLost"]
    assert "exit status 1" in said["BootstrapError"]
    assert "around_app" in said["PluginError"]
    assert said["RemoteError"] == "mod.Error: it broke"


def test_messages_read_well_without_details() -> None:
    assert "exited with status 3" in str(errors.TaskCrashed("f", 0, exit_code=3))
    assert "(no answer)" in str(errors.NodeLost(2))
    assert "on this computer" in str(errors.PluginError("p", "transform", "x"))
    assert "on node" not in str(errors.BootstrapError("step", "detail"))
    assert "was stopped" in str(errors.TaskTimeout("f", 0, 1.0))
