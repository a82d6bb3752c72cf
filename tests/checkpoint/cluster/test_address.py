"""The executor finds its cluster by an address, or says in a sentence why it does not."""

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.written import digests

from zeropoint.checkpoint.cluster.ray import RayExecutor, _join_or_start
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan
from zeropoint.checkpoint.run.executor import ExecutorError
from zeropoint.checkpoint.run.loop import run


@pytest.mark.slow
def test_the_engine_connects_to_an_address_for_its_run_alone(
    plan: CheckpointPlan, local: Path, cluster: Any, tmp_path: Path
) -> None:
    import ray

    run(plan, tmp_path / "out", executor=RayExecutor(address=cluster.address))
    assert not ray.is_initialized()
    assert digests(tmp_path / "out") == digests(local)


def test_an_address_that_does_not_answer_is_an_error(plan: CheckpointPlan, tmp_path: Path) -> None:
    rule = r"no Ray cluster answers at '127\.0\.0\.1:1': Connection refused; pass the HOST:PORT"
    with pytest.raises(ExecutorError, match=rule):
        run(plan, tmp_path / "out", executor=RayExecutor(address="127.0.0.1:1"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["head", "ray://head:10001", "head:port"])
def test_an_address_that_is_none_is_refused(address: str, plan: CheckpointPlan, tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match=rf"address '{address}' must be HOST:PORT of a Ray cluster"):
        run(plan, tmp_path / "out", executor=RayExecutor(address=address))


def test_without_ray_the_engine_says_what_to_install(
    plan: CheckpointPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ExecutorError, match=r"executor ray needs the package ray.*pip install 'zeropoint\[ray\]'"
    ):
        run(plan, tmp_path / "out", executor=RayExecutor())
    assert not os.path.lexists(tmp_path / "out")


def test_a_cluster_of_our_own_is_reached_from_this_machine_alone() -> None:
    constants = importlib.import_module("ray._private.ray_constants")
    calls: list[tuple[object, ...]] = []

    def init(address: str | None = None, **options: object) -> None:
        alone = constants.ENABLE_RAY_CLUSTER, os.environ.get(constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
        calls.append((address, *alone, options.get("include_dashboard")))
        if address is not None:
            raise ConnectionError("there is none")

    _join_or_start(types.SimpleNamespace(init=init), None)
    assert calls == [("auto", True, None, None), (None, False, "0", False)]
    with pytest.raises(ConnectionError, match="there is none"):
        _join_or_start(types.SimpleNamespace(init=init), "host:6379")
    assert len(calls) == 3
