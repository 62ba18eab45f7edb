"""Frameworks on nodes of a dask cluster: their groups span the hosts of its workers."""

from __future__ import annotations

import skyward as sky
from tests.support.dask_cluster import DaskCluster
from tests.support.groups import check_ddp, check_jax_and_keras


def test_ddp_over_two_hosts_keeps_one_model(on_hosts: DaskCluster) -> None:
    check_ddp(sky.Dask(on_hosts.address, security=on_hosts.security))


def test_jax_and_keras_span_two_hosts(on_hosts: DaskCluster) -> None:
    check_jax_and_keras(sky.Dask(on_hosts.address, security=on_hosts.security))
