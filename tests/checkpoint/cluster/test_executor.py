"""Units on a Ray cluster give the bytes of one machine, whatever happens to its nodes or to the driver."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.cluster import faulty
from tests.checkpoint.written import digests
from tests.faults.tiny import SCHEME

import zeropoint as zp
from zeropoint.checkpoint.cluster import ray as ray_engine
from zeropoint.checkpoint.cluster.ray import RayExecutor
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.recipe import KEEP
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.checkpoint.read.object_store import RemotePath, filesystem
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.executor import Executor, ExecutorError, Job, Results
from zeropoint.checkpoint.run.executor import local as on_threads
from zeropoint.checkpoint.run.loop import RunResult, run
from zeropoint.checkpoint.run.unit_results import UnitResult
from zeropoint.cli.main import main
from zeropoint.errors import NonFiniteError

pytestmark = pytest.mark.rotating


@pytest.fixture(scope="module")
def connected(session_cluster: Any) -> Iterator[None]:
    """Connect once for all tests here: Ray starts new workers for each connection."""
    import ray

    ray.cloudpickle.register_pickle_by_value(faulty)
    ray.init(address=session_cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def executor(cluster: Any, connected: None) -> RayExecutor:
    return RayExecutor(address=cluster.address)


def until(count: int, executor: Executor) -> Executor:
    """Return an executor that is interrupted, as by Ctrl-C, after ``count`` units."""

    def interrupted(job: Job) -> Results:
        done = 0
        with closing(executor(job)) as results:
            for result in results:
                yield result
                done += isinstance(result, UnitResult)
                if done == count:
                    raise KeyboardInterrupt

    return interrupted


def test_a_cluster_writes_the_bytes_of_threads(
    plan: CheckpointPlan, local: Path, executor: RayExecutor, tmp_path: Path
) -> None:
    result = run(plan, tmp_path / "out", executor=executor)
    assert digests(tmp_path / "out") == digests(local)
    assert result.resumed == 0
    assert not list((tmp_path / "out").glob(".*"))


def test_a_cluster_decodes_what_is_quantized_already(
    local: Path, executor: RayExecutor, tmp_path: Path
) -> None:
    plan = make_plan(open_source(local), KEEP, selection=Selection(dequantize=DequantizePolicy.EVERY))
    run(plan, tmp_path / "threads")
    run(plan, tmp_path / "cluster", executor=executor)
    assert digests(tmp_path / "cluster") == digests(tmp_path / "threads")


def test_the_batch_of_a_worker_that_dies_is_done_again(
    plan: CheckpointPlan, local: Path, executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "work", faulty.dies_once(tmp_path / "died"))
    run(plan, tmp_path / "out", executor=executor)
    assert (tmp_path / "died").exists()
    assert digests(tmp_path / "out") == digests(local)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["search", "convert"])
def test_a_search_and_a_conversion_outlive_a_worker_and_then_a_driver(
    verb: str, plan: CheckpointPlan, executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = tmp_path / "codes"
    zp.quantize_checkpoint(str(plan.source.given), codes, "int4:g32", workers=1)

    def write(out: Path, engine: Executor) -> RunResult:
        if verb == "convert":
            return zp.convert_checkpoint(
                codes, out, "gptq", to="int4:g32:scale=bfloat16", force=True, workers=1, executor=engine
            )
        return zp.quantize_checkpoint(
            str(plan.source.given), out, budget="9bpw", candidates="int4:g32,int8:channel", workers=1,
            executor=engine,
        )  # fmt: skip

    write(tmp_path / "threads", on_threads)
    monkeypatch.setattr(ray_engine, "work", faulty.dies_once(tmp_path / "died"))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cluster", until(5, executor))
    assert (tmp_path / "died").exists()
    monkeypatch.setattr(ray_engine, "work", faulty.dies_once(tmp_path / "died again"))
    assert write(tmp_path / "cluster", executor).resumed >= 5
    assert (tmp_path / "died again").exists()
    assert digests(tmp_path / "cluster") == digests(tmp_path / "threads")


@pytest.mark.slow
def test_the_units_of_a_node_that_goes_are_done_elsewhere(
    plan: CheckpointPlan,
    local: Path,
    executor: RayExecutor,
    cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marker, removed, over = tmp_path / "marker", [], threading.Event()

    def remove() -> None:
        while not marker.with_suffix(".at").exists() and not over.wait(0.1):
            pass
        name = marker.with_suffix(".at").read_text()
        (node,) = [node for node in cluster.worker_nodes if node.node_id == name]
        cluster.remove_node(node)
        removed.append(name)

    monkeypatch.setattr(ray_engine, "work", faulty.hangs_once(marker))
    remover = threading.Thread(target=remove)
    remover.start()
    try:
        run(plan, tmp_path / "out", executor=executor)
    finally:
        over.set()
        remover.join()
    assert len(removed) == 1
    assert digests(tmp_path / "out") == digests(local)


@pytest.mark.parametrize("first", [pytest.param("threads", marks=pytest.mark.slow), "cluster"])
def test_what_one_engine_began_the_other_ends(
    first: str, plan: CheckpointPlan, local: Path, executor: RayExecutor, tmp_path: Path
) -> None:
    engines: dict[str, Executor] = {"threads": on_threads, "cluster": executor}
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "out", executor=until(5, engines.pop(first)))
    assert (tmp_path / "out" / JOURNAL).exists()
    result = run(plan, tmp_path / "out", executor=engines.popitem()[1])
    assert 5 <= result.resumed < result.units
    assert digests(tmp_path / "out") == digests(local)


@pytest.mark.slow
def test_no_worker_outlives_a_batch_that_is_cancelled(
    plan: CheckpointPlan, executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "work", faulty.stays_once(tmp_path / "marker"))
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "out", executor=until(1, executor))
    process = Path("/proc", (tmp_path / "marker.pid").read_text())
    end = time.monotonic() + 10
    while process.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not process.exists()


def test_an_error_of_the_data_is_that_of_threads_and_leaves_nothing(
    plan: CheckpointPlan, executor: RayExecutor, tmp_path: Path
) -> None:
    entry = next(weight.source for weight in plan.weights if "o_proj" in weight.module)
    with open(entry.file, "r+b") as file:  # type: ignore[arg-type]
        file.seek(entry.begin + 34)
        file.write(b"\x80\x7f")  # infinity in bfloat16
    messages = []
    for each in (on_threads, executor):
        plan = make_plan(open_source(plan.source.given), SCHEME, limits=plan.limits)
        with pytest.raises(NonFiniteError) as caught:
            run(plan, tmp_path / "out", executor=each)
        messages.append(str(caught.value))
        assert not (tmp_path / "out").exists()
    assert messages[0] == messages[1]
    assert "contains 1 non-finite value, first at row 0, column 17 (inf)" in messages[0]


def test_a_worker_that_sees_another_file_system_is_an_error_and_keeps_what_is_done(
    plan: CheckpointPlan, local: Path, executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "out", executor=until(5, on_threads))
    (tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(ray_engine, "work", faulty.looks_elsewhere(tmp_path / "elsewhere"))
        impatient = RayExecutor(address=executor.address, patience=0)
        with pytest.raises(
            ExecutorError, match=r"does not see the driver's files in .*elsewhere'; the output must"
        ):
            run(plan, tmp_path / "out", executor=impatient)
    assert run(plan, tmp_path / "out").resumed >= 5
    assert digests(tmp_path / "out") == digests(local)


def test_a_worker_of_another_version_is_an_error_that_names_both(
    plan: CheckpointPlan, executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "work", faulty.has_version("0.0.1"))
    rule = r"the plan, seen from host .*, differs in 'zeropoint': it has '\d.*', now '0.0.1'; install one"
    with pytest.raises(ExecutorError, match=rule):
        run(plan, tmp_path / "out", executor=executor)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_runs_on_a_cluster(
    plan: CheckpointPlan,
    local: Path,
    executor: RayExecutor,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert executor.address is not None
    options = ["--to", SCHEME, "--executor", "ray", "--address", executor.address, "--no-report"]
    assert main(["quantize", str(plan.source.given), str(tmp_path / "out"), *options]) == 0
    assert digests(tmp_path / "out") == digests(local)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_cluster_fills_the_spool_of_an_output_behind_a_url(
    plan: CheckpointPlan, local: Path, executor: RayExecutor, tmp_path: Path
) -> None:
    run(plan, RemotePath("memory://bucket/out"), spool=tmp_path / "spool", executor=executor)
    store = filesystem(RemotePath("memory://bucket"))
    found = {name.removeprefix("/bucket/out/"): store.cat_file(name) for name in store.find("/bucket/out")}
    assert found == {name: (local / name).read_bytes() for name in digests(local)}
