"""A driver that is killed leaves what any executor continues with, also where nodes go meanwhile."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.cluster.conftest import STORE_BYTES, started
from tests.checkpoint.written import digests
from tests.oracles.synthetic_llama import write

from zeropoint.checkpoint.cluster.ray import RayExecutor
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.executor import Executor
from zeropoint.checkpoint.run.executor import local as on_threads
from zeropoint.checkpoint.run.loop import run

# Kills itself after some units, each of which was journaled.
DRIVER = """
import os, signal, sys
from zeropoint.checkpoint.run import commit
from zeropoint.checkpoint.run.executor import local
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.cluster.ray import RayExecutor
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.unit_results import UnitResult

source, out, scheme, address, count = sys.argv[1:]
commit.COMMIT_SECONDS = 0.0
executor = RayExecutor(address=address) if address else local

def killed(job):
    done = 0
    for result in executor(job):
        if done == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        yield result
        done += isinstance(result, UnitResult)

run(make_plan(open_source(source), scheme, limits=Limits(workers=1)), out, executor=killed)
"""
SCHEME = "nvfp4a16"


def kill_a_driver(plan: CheckpointPlan, out: Path, address: str, count: int) -> None:
    arguments = [str(plan.source.given), str(out), SCHEME, address, str(count)]
    ended = subprocess.run([sys.executable, "-c", DRIVER, *arguments], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-500:]


@pytest.mark.slow
def test_killed_drivers_and_lost_nodes_change_no_byte(tmp_path: Path) -> None:
    plan = make_plan(open_source(write(tmp_path / "model", shards=3)), SCHEME, limits=Limits(workers=2))
    golden = digests(Path(str(run(plan, tmp_path / "golden").path)))
    resumed: list[int] = []
    with started(3) as cluster:
        address = cluster.address
        ways: list[tuple[str, Executor]] = [
            (address, on_threads), ("", RayExecutor(address=address)),
            (address, RayExecutor(address=address)),
        ]  # fmt: skip
        for number, (first, second) in enumerate(ways):
            out = tmp_path / str(number)
            kill_a_driver(plan, out, first, 4)
            kill_a_driver(plan, out, first, 6)
            leaver = threading.Timer(3.0, _remove_a_node, [cluster])
            leaver.start()
            resumed.append(run(plan, out, executor=second).resumed)
            leaver.join()
            assert digests(out) == golden
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    assert min(resumed) >= 4


def _remove_a_node(cluster: Any) -> None:
    cluster.remove_node(next(iter(cluster.worker_nodes)))
