"""One Ray cluster for the whole session: a head without CPUs and nodes of one CPU, all on this machine."""

import contextlib
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.tiny import SCHEME, write_tiny

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run

STORE_BYTES = 80 << 20  # the least that Ray takes; only requests lie there


@contextlib.contextmanager
def started(nodes: int) -> Iterator[Any]:
    """Start a cluster of ``nodes`` nodes and stop it, and all of its processes, at the end."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="extra `ray`: Ray is not installed")
    cluster = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield cluster
    finally:
        cluster.shutdown()
        # Ray leaves pipes of the processes that it stopped to the garbage collector, which says so.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del cluster
            gc.collect()


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Any]:
    with started(2) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: Any) -> Any:
    """The cluster with two nodes that have a CPU, whatever a test before did to it."""
    while len(session_cluster.worker_nodes) < 2:
        session_cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    return session_cluster


@pytest.fixture
def plan(tmp_path: Path) -> CheckpointPlan:
    """A plan of 3 shards, with sets that share a scale across them."""
    model = write_tiny(tmp_path / "model")
    return make_plan(open_source(model), SCHEME, limits=Limits(workers=2))


@pytest.fixture
def local(plan: CheckpointPlan, tmp_path: Path) -> Path:
    """What threads on this machine make of the plan."""
    return run(plan, tmp_path / "local").path
