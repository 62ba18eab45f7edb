"""The test cluster itself: that it is what these tests take it for."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from tests.support.ray_cluster import GPUS, RayCluster


def test_ray_counts_three_nodes_and_the_gpus_of_two(cluster: RayCluster) -> None:
    nodes = cluster.nodes()
    assert set(nodes) == {host.address for host in cluster.network}
    assert [nodes[host.address]["Resources"].get("GPU", 0) for host in cluster.network] == [0, GPUS, GPUS]


def test_nobody_is_answered_without_the_token(cluster: RayCluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(cluster.url + "/api/jobs/", timeout=30)
    with refused.value:
        assert refused.value.code == 401
    assert isinstance(cluster.get("/api/jobs/"), list)


def test_the_clusters_python_has_no_skyward(cluster: RayCluster) -> None:
    assert "no skyward" in cluster.driver(
        "import importlib.util as u; print('skyward' if u.find_spec('skyward') else 'no skyward')"
    )
