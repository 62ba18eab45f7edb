"""The plugin system from outside the package: order of hooks, failures of hooks, and the builder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import InvalidArgument, PluginError


def note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def add_variable(name: str, image: sky.Image, cluster: sky.Cluster) -> sky.Image:
    return image.adding(env={"ORDER": image.env.get("ORDER", "") + name, name.upper(): str(cluster.nodes)})


def wrapped(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return [name, *fn(*args, **kwargs)]

    return call


@contextmanager
def around_runner(path: Path, name: str, info: sky.InstanceInfo) -> Iterator[None]:
    note(path / f"node-{info.node}", f"enter {name}")
    try:
        yield
    finally:
        note(path / f"node-{info.node}", f"leave {name}")


@contextmanager
def around_pool(path: Path, name: str, pool: sky.ComputePool, cluster: sky.Cluster) -> Iterator[None]:
    note(path / "client", f"enter {name} {cluster.nodes} x {cluster.worker.concurrency}")
    try:
        yield
    finally:
        note(path / "client", f"leave {name} {pool.name == cluster.pool}")


def plugin(path: Path, name: str) -> sky.Plugin:
    return (
        sky.Plugin.create(name)
        .with_image_transform(partial(add_variable, name))
        .with_decorator(partial(wrapped, name))
        .with_around_app(partial(around_runner, path, name))
        .with_around_client(partial(around_pool, path, name))
    )


@sky.compute
def seen() -> list[str]:
    return [os.environ["ORDER"], os.environ["A"], os.environ["B"]]


def test_hooks_run_in_the_order_of_the_list(tmp_path: Path) -> None:
    """D6: transforms feed each other, the first decorator is outermost, contexts are left in reverse."""
    with sky.ComputePool(nodes=2, plugins=[plugin(tmp_path, "a"), plugin(tmp_path, "b")], console=False) as pool:
        assert seen() @ pool == [["a", "b", "ab", "2", "2"]] * 2
        assert (tmp_path / "client").read_text().split("\n")[:-1] == ["enter a 2 x 1", "enter b 2 x 1"]
    for node in ("node-0", "node-1"):
        assert (tmp_path / node).read_text().split("\n")[:-1] == ["enter a", "enter b", "leave b", "leave a"]
    assert (tmp_path / "client").read_text().split("\n")[2:-1] == ["leave b True", "leave a True"]


def test_the_builder_returns_new_plugins() -> None:
    """D6."""
    empty = sky.Plugin.create("mine")
    full = (
        empty.with_image_transform(add_variable)  # type: ignore[arg-type]
        .with_bootstrap(lambda cluster: ["true"])
        .with_decorator(lambda fn: fn)
        .with_around_app(around_runner)  # type: ignore[arg-type]
        .with_around_client(around_pool)  # type: ignore[arg-type]
    )
    assert empty == sky.Plugin("mine")
    assert all((full.transform, full.bootstrap, full.decorate, full.around_app, full.around_client))
    with pytest.raises(AttributeError):
        full.name = "other"  # type: ignore[misc]
    with pytest.raises(InvalidArgument, match="name"):
        sky.Plugin("")
    with pytest.raises(InvalidArgument, match="decorate must be a function"):
        sky.Plugin("mine", decorate=3)  # type: ignore[arg-type]


def broken(*args: Any) -> Any:
    raise LookupError("out of paper")


@contextmanager
def broken_on_node_1(info: sky.InstanceInfo) -> Iterator[None]:
    if info.node == 1:
        raise LookupError("out of paper")
    yield


@pytest.mark.parametrize(
    ("hook", "node", "made"),
    [
        ("transform", None, sky.Plugin("printer", transform=broken)),
        ("around_app", 1, sky.Plugin("printer", around_app=broken_on_node_1)),
        ("around_client", None, sky.Plugin("printer", around_client=broken)),
    ],
)
def test_a_hook_that_raises_is_named_and_no_pool_opens(hook: str, node: int | None, made: sky.Plugin) -> None:
    """Plugin, hook and node are named; what was opened is closed again (see the fixture that looks for leftovers)."""
    pool = sky.ComputePool(nodes=2, plugins=[made], console=False)
    with pytest.raises(PluginError, match="out of paper") as caught, pool:
        pytest.fail("the pool opened")
    assert (caught.value.plugin, caught.value.hook, caught.value.node) == ("printer", hook, node)
    assert not pool.is_active


def test_a_transform_that_forgets_to_return_is_named() -> None:
    made = sky.Plugin("printer", transform=lambda image, cluster: None)  # type: ignore[arg-type,return-value]
    with (
        pytest.raises(PluginError, match=r"it gave None, not a sky\.Image"),
        sky.ComputePool(plugins=[made], console=False),
    ):
        pytest.fail("the pool opened")


def test_a_client_context_that_fails_on_leaving_does_not_keep_the_nodes(tmp_path: Path) -> None:
    @contextmanager
    def fails_late(pool: sky.ComputePool, cluster: sky.Cluster) -> Iterator[None]:
        yield
        raise LookupError("out of paper")

    made = sky.Plugin("printer", around_client=fails_late)
    with pytest.raises(Exception, match="out of paper"):
        with sky.ComputePool(plugins=[plugin(tmp_path, "a"), made], console=False):
            pass
    assert (tmp_path / "client").read_text().split("\n")[:-1] == ["enter a 1 x 1", "leave a True"]
    assert (tmp_path / "node-0").read_text().split("\n")[:-1] == ["enter a", "leave a"]


def test_the_shell_lines_of_a_plugin_run_before_the_first_call(tmp_path: Path) -> None:
    """Checklist, Plugin: bootstrap steps after the standard ones."""
    mark = tmp_path / "it's here"
    plugin = sky.Plugin.create("marking").with_bootstrap(
        lambda cluster: [f"echo {cluster.nodes} nodes > {shlex.quote(str(mark))}", "command -v python >/dev/null"]
    )
    with sky.ComputePool(nodes=2, plugins=[plugin], console=False) as pool:
        assert sky.compute(mark.read_text)() >> pool == "2 nodes\n"


def test_a_shell_line_that_fails_names_its_plugin_and_says_what_was_printed() -> None:
    plugin = sky.Plugin(
        "broken", bootstrap=lambda cluster: ["echo before", "echo no such thing >&2; false", "echo after"]
    )
    with pytest.raises(sky.errors.PluginError, match=r"(?s)broken.*bootstrap.*status 1.*no such thing"):
        with sky.ComputePool(plugins=[plugin], console=False):
            pass


def test_shell_lines_that_are_one_text_are_refused() -> None:
    plugin = sky.Plugin("odd", bootstrap=lambda cluster: "echo")
    with pytest.raises(sky.errors.PluginError, match="list of shell lines"):
        with sky.ComputePool(plugins=[plugin], console=False):
            pass
