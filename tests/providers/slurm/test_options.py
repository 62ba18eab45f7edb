"""From a spec to the options of sbatch."""

from __future__ import annotations

import math

import pytest

from skyward.accelerators import resolve
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument, NoOffer
from skyward.providers.slurm.options import (
    Gpus,
    check_time,
    extra_options,
    gpu_request,
    job_options,
    parse_gpus,
    seconds,
)

NONE: dict[str, str | None] = {"partition": None, "time": None}


def test_a_plain_pool_asks_for_nodes_and_leaves_the_rest_to_the_site() -> None:
    options = job_options(NONE, (), Spec(), 4, None)
    assert options[:2] == ["--nodes=4", "--ntasks-per-node=1"]
    assert not [option for option in options if option.startswith(("--time", "--mem", "--cpus", "--gres"))]
    assert {"--no-requeue", "--no-kill", "--output=/dev/null"} <= set(options)


def test_a_spec_becomes_cpus_memory_gpus_and_time() -> None:
    spec = Spec(vcpus=7.5, memory_gb=1.5, ttl=5400)
    options = job_options({**NONE, "partition": "gpu"}, (), spec, 2, "gpu:a100:2")
    assert {"--cpus-per-task=8", "--mem=1536M", "--gres=gpu:a100:2", "--time=90", "--partition=gpu"} <= set(options)


def test_the_own_settings_win_over_what_the_spec_means() -> None:
    settings = {"gres": "gpu:2", "time": "1:00:00"}
    options = job_options(settings, (("mem", "0"), ("exclusive", True)), Spec(memory_gb=4, ttl=86400), 1, "gpu:a100:1")
    assert {"--gres=gpu:2", "--time=1:00:00", "--mem=0", "--exclusive"} <= set(options)


def test_a_job_does_not_outlive_its_pool() -> None:
    assert "--time=2" in job_options({"time": "1:00:00"}, (), Spec(ttl=100), 1, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_times_are_read_as_slurm_reads_them(text: str, expected: float) -> None:
    check_time(text)
    assert seconds(text) == expected


@pytest.mark.parametrize("wrong", [3600, 1.5, "", "2h", "1:2:3:4", "-5", "1 hour"])
def test_a_time_in_another_unit_is_refused_with_the_right_spelling(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match='"2:00:00" is two hours'):
        check_time(wrong)


def test_no_limit_is_no_limit() -> None:
    assert seconds("UNLIMITED") == math.inf


def test_further_options_are_checked_before_anything_is_started() -> None:
    assert extra_options({"mail-type": "END", "exclusive": True, "reservation": None, "nice": 5}) == (
        ("mail-type", "END"),
        ("exclusive", True),
        ("nice", 5),
    )
    with pytest.raises(InvalidArgument, match=r"setting of its own: sky.Slurm\(partition=...\)"):
        extra_options({"partition": "gpu"})
    for name in ("nodes", "job-name", "export", "requeue", "array"):
        with pytest.raises(InvalidArgument, match="set by the pool itself"):
            extra_options({name: "1"})
    for wrong in ("--exclusive", "Mail", "a b"):
        with pytest.raises(InvalidArgument, match="without dashes"):
            extra_options({wrong: True})
    with pytest.raises(InvalidArgument, match="line break"):
        extra_options({"mail-user": "a\nb"})


def test_gpus_of_nodes_are_read_from_sinfo() -> None:
    said = "3|gpu:a100:2(S:0-1)\n8|gpu:v100:4,gpu:t4:1(S:0),craynetwork:4\n2|gpu:2\n5|(null)\n1|gpu:a100:2(IDX:0)\n"
    assert parse_gpus(said) == [Gpus("a100", 2, 4), Gpus("v100", 4, 8), Gpus("t4", 1, 8), Gpus("", 2, 2)]


@pytest.mark.parametrize(
    ("wanted", "site", "request_"),
    [
        ("A100:2", "a100", "gpu:a100:2"),
        ("A100", "NVIDIA_A100-SXM4-80GB", "gpu:NVIDIA_A100-SXM4-80GB:1"),
        ("RTX_4090", "rtx_4090", "gpu:rtx_4090:1"),
        ("RTX_4090", "nvidia_geforce_rtx_4090", "gpu:nvidia_geforce_rtx_4090:1"),
        ("V100", "tesla_v100", "gpu:tesla_v100:1"),
    ],
)
def test_a_site_s_own_name_of_a_gpu_is_found(wanted: str, site: str, request_: str) -> None:
    assert gpu_request(resolve(wanted), [Gpus("t4", 8, 9), Gpus(site, 4, 2)], "Slurm") == request_


def test_an_a10_is_no_a100_and_another_size_of_memory_is_another_gpu() -> None:
    for wanted, site in (("A10", "a100"), ("A100-80GB", "nvidia_a100_40gb"), ("A100:8", "a100")):
        with pytest.raises(NoOffer, match=r"4 x .*on 2 nodes"):
            gpu_request(resolve(wanted), [Gpus(site, 4, 2)], "Slurm")


def test_a_site_that_names_no_types_is_asked_for_any() -> None:
    assert gpu_request(resolve("A100:2"), [Gpus("", 4, 2)], "Slurm") == "gpu:2"
    assert gpu_request(None, [], "Slurm") is None


def test_a_site_without_gpus_says_so() -> None:
    with pytest.raises(NoOffer, match="no GPUs at all"):
        gpu_request(resolve("A100"), [], "the partition cpu")
