"""What `sky.Ray` takes and refuses, and what it asks of Ray."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.errors import InvalidArgument
from skyward.providers.ray.jobs import Jobs, RayRefused
from skyward.providers.ray.provider import accelerator_types, demand, parse_address


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("resources", "options", "asked"),
    [
        ({}, {}, {"CPU": 1}),
        ({}, {"vcpus": 4, "memory_gb": 8}, {"CPU": 4, "memory": 8_000_000_000}),
        ({}, {"accelerator": "A100:2"}, {"CPU": 1, "GPU": 2}),
        ({"CPU": 2, "GPU": 0.5}, {"accelerator": "A100"}, {"CPU": 2, "GPU": 0.5}),
        ({"TPU": 4}, {"accelerator": "TPU_V5E:4"}, {"TPU": 4}),
        ({"gpu_node": 1}, {"vcpus": 2}, {"gpu_node": 1, "CPU": 2}),
    ],
)
def test_a_node_asks_for_what_the_user_says_in_either_words(
    resources: dict[str, float], options: dict[str, float], asked: dict[str, float]
) -> None:
    assert demand(resources, sky.Spec(**options)) == asked  # type: ignore[arg-type]


def test_the_exact_type_of_gpu_comes_first() -> None:
    assert accelerator_types(sky.Spec(accelerator="A100")) == ["accelerator_type:A100"]
    exact = accelerator_types(sky.Spec(accelerator="A100-40GB"))
    assert exact == ["accelerator_type:A100-40G", "accelerator_type:A100"]
    assert accelerator_types(sky.Spec()) == []


def test_auto_is_what_rays_own_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_address("auto") == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert parse_address("auto") == "auto"  # Ray itself reads it
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265/")
    assert parse_address("auto") == "http://head:8265"
    assert parse_address("http://other:8265") == "http://other:8265"


def test_only_pools_that_a_job_holds_can_outlive_their_client() -> None:
    assert sky.Ray("http://head:8265").rented
    assert not sky.Ray("10.0.0.1:6379").rented


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": "ray://head:10001"}, "Jobs API"),
        ({"address": 7}, "not an address"),
        ({"strategy": "TIGHT"}, "STRICT_SPREAD"),
        ({"resources": {"CPU": -1}}, "cannot be asked of Ray"),
        ({"resources": {"CPU": "4"}}, "cannot be asked of Ray"),
        ({"token": " "}, "token= is not a token"),
        ({"lease": 0}, "lease"),
        ({"port": 70000}, "port"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_written(options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        sky.Ray(**options)  # type: ignore[arg-type]


def test_its_token_is_not_shown() -> None:
    assert "s3cret" not in repr(sky.Ray("http://head:8265", token="s3cret"))


def test_a_runtime_env_is_answered_with_the_image_of_the_pool() -> None:
    with pytest.raises(TypeError, match=r"image=sky\.Image\(pip="):
        sky.Ray(runtime_env={"pip": ["numpy"]})  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("answer", [b"", b"<html>", b"3", b"null", b'"x"'])
def test_an_answer_that_is_not_of_the_jobs_api_is_named(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs("http://head:8265")
    monkeypatch.setattr(Jobs, "_ask", lambda *_: answer)
    for ask in (lambda: jobs.job("a"), lambda: jobs.log("a"), jobs.listed):
        with pytest.raises(RayRefused, match="not Ray's Jobs API"):
            ask()
    monkeypatch.setattr(Jobs, "_ask", lambda *_: b"[]")
    assert jobs.listed() == []
    with pytest.raises(RayRefused, match="not Ray's Jobs API"):
        jobs.job("a")
