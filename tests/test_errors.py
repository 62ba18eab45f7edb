"""Errors cross processes: each class keeps its fields and its message."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from skyward import errors
from skyward.api.stacks import Stack, Stacks

EXAMPLES: dict[str, tuple[Any, ...]] = {
    "AcceleratorMismatch": ("accelerator", "it has 1 x NVIDIA H200, and that is no A100", 0, None),
    "AuthenticationFailed": ("connecting", "no key fits", 0, 255),
    "BarrierBroken": ("barrier 'x' is broken: rank 2 is lost", 2),
    "BootstrapError": ("pip", "no such package", 2, 1),
    "CloudRefused": ("ec2:RunInstances", "InternalError", "it broke", "us-east-1", "server"),
    "CredentialsExpired": ("ec2:RunInstances", "RequestExpired", "too old", "us-east-1", "expired"),
    "CredentialsMissing": ("sts:X", "NoCredentials", "none were found", "us-east-1", "credentials", ("AWS_PROFILE",)),
    "ClockSkew": ("connecting", "a day apart", 1, None),
    "FilesLost": ("an argument of train", "/dev/shm/skyward-1-x/0a1b"),
    "HostKeyMismatch": ("connecting", "another key", 1, 255),
    "HostUnreachable": ("connecting", "no answer", 2, 255),
    "NoCapacity": ("2 x A100", ("2 x p4d.24xlarge (spot, us-east-1a): InsufficientInstanceCapacity",)),
    "NoOffer": ("H100", "AWS in eu-north-1", ("p5.48xlarge: not offered",)),
    "NoPlace": ("1 of 2 nodes have a place", ("the cluster starts no more workers",)),
    "NodeDiskFull": ("train", 1, 50_000_000, "No space left on device", "the result"),
    "NodeLost": (1, "train", "its agent was restarted", 3, False),
    "NoneAvailable": ("2 specs", ("2 x A100, from AWS: no capacity", "1 node, from SSH: no answer")),
    "NotGivenBack": ("train-1a2b3c", "us-east-1", ("i-1", "i-2"), 8.5, "The line is down."),
    "PermissionDenied": ("ec2:RunInstances", "UnauthorizedOperation", "no", "us-east-1", "permission"),
    "PluginError": ("torch", "around_app", "no route", 2, 5),
    "RefLost": ("load", 1, "no answer"),
    "PythonMismatch": ("python", "3.11 here, 3.12 there", 0, None),
    "QuotaExceeded": ("ec2:RunInstances", "VcpuLimitExceeded", "0 vCPUs", "us-east-1", "quota", "'P instances'"),
    "RemoteError": ("mod.Error", "it broke", "Traceback ..."),
    "ResultTooLarge": ("train", 3_000_000, 1_000_000),
    "Stalled": ("train", "train: rank 1 has returned", 300.0, Stacks([Stack(0, 0, "running", "c", "train")])),
    "TaskCrashed": ("train", 1, 2, -11, "SIGSEGV", "last words", 3, 5),
    "TaskOutOfMemory": ("train", 1, 0, -9, "SIGKILL", "", 0, None),
    "TransferError": (1, "data/x", "No space left on device", 28),
    "TaskTimeout": ("train", 1, 2.5, 1, True, None, False),
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
    error = example(kind)
    assert [getattr(error, name) for name in names] == list(EXAMPLES[kind.__name__])
    assert vars(error).keys() <= set(names)


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
        ("NoOffer", errors.CloudError),
        ("Stalled", TimeoutError),
        ("TransferError", OSError),
        ("CredentialsMissing", errors.CloudError),
        ("QuotaExceeded", errors.CloudRefused),
    ],
)
def test_each_is_also_what_callers_would_expect(kind: str, also: type[Exception]) -> None:
    assert issubclass(getattr(errors, kind), also)


def test_one_base_has_everything_by_which_a_call_fails() -> None:
    """`except TaskError` misses no failed call; what is an InvalidArgument is nothing else."""
    failed = """TaskCrashed TaskOutOfMemory TaskTimeout Stalled NodeLost RefLost NodeDiskFull FilesLost ResultTooLarge
        ResultNotSerializable RemoteError Preempted""".split()
    assert {kind.__name__ for kind in every_class() if issubclass(kind, errors.TaskError)} == {"TaskError", *failed}
    assert [kind for kind in every_class() if issubclass(kind, errors.InvalidArgument)] == [errors.InvalidArgument]


def test_a_failed_transfer_is_read_as_other_errors_of_files_are() -> None:
    error = errors.TransferError(1, "data/x", "No space left on device", 28)
    assert (error.errno, error.strerror, error.filename) == (28, "No space left on device", "data/x")


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
    assert "sky down train-1a2b3c --yes" in said["NotGivenBack"]
    assert "$8.50 an hour" in said["NotGivenBack"]
    assert "an hour" not in str(errors.NotGivenBack("train", "Slurm (this computer)", ["job 7"], 0.0, "It is down."))
    assert "p4d.24xlarge" in said["NoCapacity"]
    assert "AWS_PROFILE" in said["CredentialsMissing"]
    assert "'P instances'" in said["QuotaExceeded"]
    assert "ec2:RunInstances" in said["PermissionDenied"]
    assert said["RemoteError"] == "mod.Error: it broke"


def test_messages_read_well_without_details() -> None:
    assert "exited with status 3" in str(errors.TaskCrashed("f", 0, exit_code=3))
    assert "(no answer)" in str(errors.NodeLost(2))
    over = [errors.NodeLost(0, "f", f"{why}the pool's ttl of 4 s is over", n) for n, why in ((0, "no node: "), (1, ""))]
    assert all("longer ttl=" in str(error) and "retries" not in str(error) for error in over)
    assert "on this computer" in str(errors.PluginError("p", "transform", "x"))
    assert "on node" not in str(errors.BootstrapError("step", "detail"))
    assert "was stopped" in str(errors.TaskTimeout("f", 0, 1.0))
    assert "provision_timeout" in str(errors.TaskTimeout("f", 0, 1.0, loading=True))
    assert "f on rank 3 (node 1) ran" in str(errors.TaskTimeout("f", 1, 1.0, rank=3))
    assert "on rank 3 (node 1)" in str(errors.TaskCrashed("f", 1, exit_code=3, rank=3))
    assert "on rank 3 (node 1)" in str(errors.PluginError("p", "around_app", "x", 1, 3))


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)
def test_an_error_in_a_list_of_results_is_shown_by_its_type_and_its_first_line(kind: type[Exception]) -> None:
    error = example(kind)
    shown = repr([error])
    assert shown.startswith(f"[{kind.__name__}(")
    assert str(error).partition("\n")[0][:100] in shown.replace("\\'", "'")
    assert len(shown) < 500


def test_an_attempt_is_named_only_where_there_were_others_and_counted_from_one() -> None:
    assert "attempt" not in str(errors.TaskCrashed("f", 0, exit_code=3))
    assert "(attempt 2)" in str(errors.TaskCrashed("f", 0, 1, 3))
    assert "attempt" not in str(errors.TaskTimeout("f", 0, 1.0))
    assert "was stopped (attempt 3)." in str(errors.TaskTimeout("f", 0, 1.0, 2))


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (
            errors.NodeLost(2, "train", "it was rebooted", attempts=0, broadcast=True),
            "train was not started: node 2 is lost (it was rebooted). A broadcast needs all nodes; calls with >> go to "
            "those that are left, and a node that comes back takes part again.",
        ),
        (
            errors.NodeLost(2, "train", "it was rebooted", attempts=0),
            "train was not started: node 2 is lost (it was rebooted). Open another pool.",
        ),
        (
            errors.NodeLost(0, reason="no node of the pool is left: it was rebooted", attempts=0),
            "the call was not started: no node of the pool is left: it was rebooted. Open another pool.",
        ),
    ],
)
def test_only_a_broadcast_is_told_that_other_calls_may_still_run(lost: errors.NodeLost, text: str) -> None:
    assert str(lost) == text
