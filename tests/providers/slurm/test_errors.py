"""What Slurm refuses, in words. A real sbatch says the same: tests/slurm/test_refusals.py asks one."""

from __future__ import annotations

import pickle

import pytest

from skyward.providers.slurm.commands import refusal

SETTINGS = {
    "partition": "gpuu",
    "account": "proj",
    "qos": None,
    "time": "9-0",
    "nodelist": "h9",
    "exclude": None,
    "constraint": "fast",
    "gres": "gpu:9",
    "options": "foo",
    "partitions": "main, gpu",
}


@pytest.mark.parametrize(
    ("said", "kind", "expected"),
    [
        ("invalid partition specified: gpuu", "other", "no partition gpuu. These exist: main, gpu"),
        ("Invalid account or account/partition combination specified", "permission", "the account proj"),
        ("Invalid qos specification", "permission", "the QOS (the default)"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "other", "the time limit 9-0"),
        ("Invalid node name specified", "other", "nodelist=h9"),
        ("Invalid feature specification", "other", "constraint=fast"),
        ("Invalid generic resource (gres) specification", "other", "gres=gpu:9"),
        ("Requested node configuration is not available", "capacity", "no nodes of the partition gpuu"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "quota", "a limit"),
        ("User's group not permitted to use this partition", "permission", "you may not use the partition gpuu"),
        ("Unable to contact slurm controller (connect failure)", "server", "controller does not answer"),
        ("Could not establish a configuration source", "other", 'sky.Slurm(login="user@login")'),
    ],
)
def test_each_refusal_says_what_is_wrong_and_what_sbatch_said(said: str, kind: str, expected: str) -> None:
    error = refusal("sbatch", 1, f"sbatch: error: Batch job submission failed: {said}\n", "this computer", SETTINGS)
    assert error.kind == kind
    assert expected in str(error)
    assert f"(sbatch on this computer said: Batch job submission failed: {said})" in str(error)


def test_what_a_site_s_own_filter_says_comes_first_and_whole() -> None:
    said = "sbatch: error: Project ada has no budget left.\nsbatch: error: Ask at https://site.example. " + "x" * 900
    text = str(refusal("sbatch", 1, said, "this computer", SETTINGS))
    assert text.startswith("Slurm refused the job: Project ada has no budget left. / Ask at https://site.example. xxx")
    assert text.endswith("xxx (sbatch on this computer said this)")


def test_a_computer_without_slurm_says_where_to_go() -> None:
    error = refusal("sbatch", 127, "sh: 1: exec: sbatch: not found", "me@laptop", {})
    assert "there is no sbatch on me@laptop" in str(error)
    assert 'sky.Slurm(login="user@login")' in str(error)


def test_the_error_survives_a_journey_between_processes() -> None:
    error = refusal("sbatch", 1, "Invalid qos specification", "h0", SETTINGS)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
