"""The doors to the joblib backend: pools for joblib, an open pool, the plugin, and the backend's name."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import joblib
import pytest
from joblib import Parallel, delayed, parallel_config
from joblib.parallel import get_active_backend

import skyward as sky
from skyward.errors import InvalidArgument, PluginError, PoolClosed


def square(x: int) -> int:
    return x * x


def pid() -> int:
    return os.getpid()


def test_one_slot_is_still_a_node() -> None:
    """S0-37: with a single slot joblib would run the calls here."""
    with sky.integrations.JoblibPool(console=False):
        assert joblib.effective_n_jobs(-1) == 1
        assert os.getpid() not in Parallel(n_jobs=-1)(delayed(pid)() for _ in range(3))
        with Parallel(n_jobs=-1) as parallel:
            assert os.getpid() not in parallel(delayed(pid)() for _ in range(3))
            assert parallel(delayed(square)(i) for i in range(3)) == [0, 1, 4]
            sent = sky.compute(square)
            with pytest.raises(InvalidArgument, match=r"delayed\(square\.local\)"):
                parallel(delayed(sent)(i) for i in range(300))
            assert parallel(delayed(sent.local)(i) for i in range(3)) == [0, 1, 4]


def test_leaving_restores_the_backend_and_ends_the_nodes() -> None:
    """S0-39, S0-41, S0-42: used by keyword and without `as`."""
    with parallel_config("threading", n_jobs=3):
        with sky.integrations.JoblibPool(provider=sky.Local(), nodes=2, concurrency=1, console=False):
            assert type(get_active_backend()[0]).__name__ == "SkywardBackend"
            assert os.getpid() not in Parallel(n_jobs=-1)(delayed(pid)() for _ in range(4))
        assert type(get_active_backend()[0]).__name__ == "ThreadingBackend"
        assert joblib.effective_n_jobs(None) == 3


def test_an_open_pool_is_borrowed_and_stays_open() -> None:
    """S0-50, S0-51, S0-52, T1."""
    assert sky.integrations.sklearn_backend is sky.integrations.joblib_backend
    with sky.ComputePool(provider=sky.Local(), nodes=2, console=False) as mine:
        with sky.integrations.sklearn_backend(mine) as same:
            assert same is mine
            assert os.getpid() not in Parallel(n_jobs=-1)(delayed(pid)() for _ in range(4))
        assert type(get_active_backend()[0]).__name__ == "LokyBackend"
        assert sky.compute(square)(3) >> mine == 9
        by_name(mine)
    with pytest.raises(PoolClosed, match="not open"), sky.integrations.joblib_backend(mine):
        pass


def test_other_threads_of_the_program_use_the_pool_too() -> None:
    """S0-40: joblib keeps its configuration by thread; a search started from a thread pool must not stay here."""

    def used(**options: Any) -> set[int]:
        return set(Parallel(n_jobs=-1, **options)(delayed(pid)() for _ in range(4)))

    with ThreadPoolExecutor(1) as threads:
        with sky.integrations.JoblibPool(nodes=2, console=False) as outer:
            assert os.getpid() not in threads.submit(used).result()
            assert os.getpid() not in threads.submit(used, prefer="threads").result()  # as random forests ask
            with sky.integrations.joblib_backend(outer, max_inflight=1):
                assert os.getpid() not in threads.submit(used).result()
            assert os.getpid() not in threads.submit(used).result()
        assert threads.submit(lambda: type(get_active_backend()[0]).__name__).result() == "LokyBackend"


def test_a_plugin_that_wraps_functions_does_not_keep_joblib_out() -> None:
    """S0-51, S0-40, S1-12: what a batch runs is a function of ours, which plugins and decorators wrap as any other."""
    quiet = sky.Plugin.create("quiet").with_decorator(sky.silent)
    with (
        sky.ComputePool(plugins=[sky.plugins.jax(), sky.plugins.keras(), quiet], console=False) as mine,
        sky.integrations.sklearn_backend(mine),
    ):
        assert Parallel(n_jobs=-1)(delayed(pow)(i, 2) for i in range(3)) == [0, 1, 4]


def by_name(mine: sky.ComputePool) -> None:
    """The backend by its name: the pool that is given, or the innermost one."""
    with parallel_config("skyward", n_jobs=2):
        assert os.getpid() not in Parallel()(delayed(pid)() for _ in range(4))
    with joblib.parallel_backend("skyward", pool=mine):
        assert joblib.effective_n_jobs(-1) == 2
        assert os.getpid() not in Parallel()(delayed(pid)() for _ in range(4))
    assert os.getpid() not in Parallel(n_jobs=2, backend="skyward")(delayed(pid)() for _ in range(4))


def test_without_an_open_pool_the_name_says_so() -> None:
    from skyward.plugins._joblib import register

    register()
    with parallel_config("skyward"), pytest.raises(PoolClosed, match="none is open"):
        Parallel(n_jobs=2)(delayed(square)(i) for i in range(3))
    with pytest.raises(InvalidArgument, match="not a pool"), sky.integrations.joblib_backend("pool"):  # type: ignore[type-var]
        pass


def test_the_plugin_adds_joblib_and_leaves_the_image_as_it_is() -> None:
    """S1-28, T10."""
    image = sky.Image(includes=["a"], excludes=["b"], shell_vars={"C": "1"}, env={"D": "2"})
    cluster = sky.Cluster("p", 1, sky.Worker(), sky.Spec())
    made = sky.plugins.joblib().transform(image, cluster)  # type: ignore[misc]
    assert made.pip[0] == f"joblib=={joblib.__version__}"
    assert image.adding(pip=made.pip) == made
    assert sky.plugins.joblib("1.4").transform(image, cluster).pip == ("joblib==1.4",)  # type: ignore[misc]
    assert sky.plugins.joblib("~=1.4").transform(image, cluster).pip == ("joblib~=1.4",)  # type: ignore[misc]
    own = image.adding(pip=["joblib>=1.3"])
    assert "joblib>=1.3" in sky.plugins.joblib().transform(own, cluster).pip  # type: ignore[misc]
    assert f"joblib=={joblib.__version__}" not in sky.plugins.joblib().transform(own, cluster).pip  # type: ignore[misc]


def test_arrays_find_the_clients_versions_on_the_nodes() -> None:
    """S0_9: what bodies need comes along; an image or a version that says otherwise is left to the resolver."""
    import numpy
    import scipy

    cluster = sky.Cluster("p", 1, sky.Worker(), sky.Spec())
    for plugin in (sky.plugins.joblib(), sky.plugins.sklearn()):
        made = plugin.transform(sky.Image(), cluster)  # type: ignore[misc]
        assert {f"numpy=={numpy.__version__}", f"scipy=={scipy.__version__}"} <= set(made.pip)
        own = plugin.transform(sky.Image(pip=["numpy<2"]), cluster)  # type: ignore[misc]
        assert f"numpy=={numpy.__version__}" not in own.pip
    older = sky.plugins.sklearn("1.4").transform(sky.Image(), cluster)  # type: ignore[misc]
    assert older.pip == ("scikit-learn==1.4", f"joblib=={joblib.__version__}")


def test_without_joblib_on_this_computer_no_machine_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyward.plugins import _joblib

    monkeypatch.setattr(_joblib, "find_spec", lambda name: None)
    asked: list[str] = []
    monkeypatch.setattr("skyward.pool.opening.acquire", lambda *_: asked.append("machines"))
    with pytest.raises(PluginError, match="pip install joblib"), sky.integrations.JoblibPool(console=False):
        pass
    assert asked == []


def test_a_pool_for_joblib_keeps_what_the_user_said() -> None:
    """T10, D6: image, plugins and options of the pool reach it; slots are processes unless said otherwise."""
    image = sky.Image(includes=["tests"], env={"A": "1"})
    mine = sky.Plugin("mine")
    made = sky.integrations.JoblibPool(nodes=3, concurrency=5, image=image, plugins=[mine], name="named")
    assert (made.image, made.nodes, made.worker, made.name) == (image, 3, sky.Worker(5, "process"), "named")
    assert [p.name for p in made.plugins] == ["mine", "joblib"]
    threads = sky.Worker(2, "thread")
    assert sky.integrations.JoblibPool(worker=threads).worker is threads
    with pytest.raises(InvalidArgument, match="max_inflight"):
        sky.integrations.JoblibPool(max_inflight=0)
    with pytest.raises(InvalidArgument, match="not both"):
        sky.integrations.ScikitLearnPool(concurrency=1, worker=threads)
    with pytest.raises(InvalidArgument, match=r"1\.5 is not a version of scikit-learn"):
        sky.integrations.ScikitLearnPool(sklearn_version=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"1\.5 is not a version of joblib"):
        sky.integrations.JoblibPool(joblib_version=1.5)  # type: ignore[arg-type]
