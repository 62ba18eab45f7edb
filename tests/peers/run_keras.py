"""Runs Keras' own tests of distribution on pools: on one node with eight devices, and on four nodes with two each."""

from __future__ import annotations

import time
from typing import Any

from figures import Figures

import skyward as sky

__all__ = ["main"]

ALONE = {
    "jax": (
        "keras.src.distribution.distribution_lib_test",
        "keras.src.backend.jax.distribution_lib_test",
        "keras.src.backend.jax.jax_multi_process_distribution_test",
    ),
    "tensorflow": (
        "keras.src.backend.tensorflow.distribute_test",
        "keras.src.backend.tensorflow.optimizer_distribute_test",
    ),
}
# It expects four processes with two devices each, where there are several.
TOGETHER = ("keras.src.backend.jax.jax_multi_process_distribution_test",)


def body(modules: tuple[str, ...]) -> tuple[int, dict[str, str], dict[str, str]]:
    """Runs test modules in this process: how many passed, and which failed or were skipped, why."""
    import os
    import tempfile

    import pytest

    found: tuple[list[str], dict[str, str], dict[str, str]] = ([], {}, {})

    class Counts:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.skipped:
                found[2][report.nodeid] = str(report.longrepr[2] if report.longrepr else "")
            elif report.failed:
                found[1][report.nodeid] = report.longreprtext[-500:]
            elif report.when == "call":
                found[0].append(report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                found[1][report.nodeid] = report.longreprtext[-500:]

    before = dict(os.environ)
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        jax.devices()  # some of these tests clear the environment, which says how many there are
    with tempfile.TemporaryDirectory() as empty:
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:timeout", "-W", "ignore"]
        pytest.main([*options, "-c", os.devnull, "--rootdir", empty, "--pyargs", *modules], [Counts()])
    os.environ.update(before)
    return len(found[0]), found[1], found[2]


def main() -> Figures:
    """All of them; a test that runs on four nodes counts once, and has passed if it has on all of them."""
    figures, began = Figures("Keras' distribution tests"), time.monotonic()
    for backend, modules in ALONE.items():
        image = sky.Image(env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
        plugins = [sky.plugins.jax()] * (backend == "jax") + [sky.plugins.keras(backend=backend)]
        with sky.ComputePool(plugins=plugins, image=image, console=False) as one:
            _add(figures, f"{backend}, one node", [sky.compute(body)(modules) >> one])
    image = sky.Image(env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    with sky.ComputePool(nodes=4, plugins=[sky.plugins.jax(), sky.plugins.keras()], image=image, console=False) as four:
        _add(figures, "four nodes", sky.compute(body)(TOGETHER) @ four)
    figures.seconds = time.monotonic() - began
    return figures


def _add(figures: Figures, where: str, results: list[tuple[int, dict[str, str], dict[str, str]]]) -> None:
    figures.passed += min(passed for passed, _, _ in results)
    for _, failures, skips in results:
        figures.failures |= {f"{where}: {name}": reason for name, reason in failures.items()}
        figures.skips |= {f"{where}: {name}": reason for name, reason in skips.items()}
    print(f"Keras: {where}: {[passed for passed, _, _ in results]} passed", flush=True)


if __name__ == "__main__":
    print(main())
