"""Checkpoints of very many tensors: what is kept of each is small, and work grows with their number alone."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.checkpoint import mixture
from tests.checkpoint.verify.test_memory import peak_of
from tests.counting import calls

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.rotating

FEW, MANY = 6, 24
ONE = Limits(workers=1)
MOST_BYTES = 3500
"""Of Python's memory for each weight more, what two seconds' results wait for in the journal included, which
varies by a thousand: 1,500 to 2,700 were seen. It was 9,000."""
WIDE = 512 << 20


def planned(folder: Path) -> CheckpointPlan:
    return make_plan(open_source(folder), "nvfp4a16", limits=ONE)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints of 54 and of 216 weights in three files."""
    folder = tmp_path_factory.mktemp("many")
    return {n: mixture.write(folder / f"in-{n}", experts=n, layers=3) for n in (FEW, MANY)}


@pytest.fixture(scope="module")
def outputs(sources: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("many-out")
    for n, source in sources.items():
        run(planned(source), folder / str(n))
    return {n: folder / str(n) for n in sources}


def peak(work: Callable[[int], object]) -> int:
    """Return the most memory that Python's objects took while ``work`` ran, the least of two times.

    Tables of the interpreter, such as that of interned strings, may grow at any time, once, and on a busy
    machine more tasks of one time may wait for the writer.
    """
    return min(_peak(work, time) for time in range(2))


def _peak(work: Callable[[int], object], time: int) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work(time)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_run_keeps_little_of_each_weight(
    sources: dict[int, Path], outputs: dict[int, Path], tmp_path: Path
) -> None:
    def quantize(n: int, time: int) -> None:
        run(planned(sources[n]), tmp_path / f"{n}-{time}")

    few, many = (peak(partial(quantize, n)) for n in (FEW, MANY))
    more = mixture.weights(experts=MANY, layers=3) - mixture.weights(experts=FEW, layers=3)
    assert (many - few) / more < MOST_BYTES
    assert (tmp_path / f"{MANY}-1" / "zeropoint_manifest.json").read_bytes() == (
        outputs[MANY] / "zeropoint_manifest.json"
    ).read_bytes()


def test_verification_keeps_little_of_each_weight(sources: dict[int, Path], outputs: dict[int, Path]) -> None:
    def check(n: int, _: int) -> None:
        verify(outputs[n], sources[n], limits=ONE)

    few, many = (peak(partial(check, n)) for n in (FEW, MANY))
    more = mixture.weights(experts=MANY, layers=3) - mixture.weights(experts=FEW, layers=3)
    assert (many - few) / more < MOST_BYTES


@pytest.mark.parametrize("verb", ["plan", "inspect"])
def test_the_work_grows_with_the_number_of_weights_alone(
    verb: str, sources: dict[int, Path], outputs: dict[int, Path]
) -> None:
    works: dict[str, Callable[[int], object]] = {
        "plan": lambda n: planned(sources[n]), "inspect": lambda n: inspect_checkpoint(outputs[n])
    }  # fmt: skip
    works[verb](FEW)  # what is compiled or looked up once
    few, many = (calls(partial(works[verb], n)) for n in (FEW, MANY))
    assert many / few < 1.1 * MANY / FEW


def test_tensors_that_leave_no_room_are_refused_before_any_work(sources: dict[int, Path]) -> None:
    limits = Limits(workers=1, max_memory=ONE.base_memory + 100_000)
    with pytest.raises(
        CheckpointError, match=r"is too little for \d+ tensors, of which \d+ bytes each are kept"
    ):
        make_plan(open_source(sources[MANY]), "nvfp4a16", limits=limits)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are Linux's")
def test_100000_weights_go_through_every_command_within_512m(tmp_path: Path) -> None:
    warm = mixture.write(tmp_path / "warm", experts=1, layers=1)
    peak_of("quantize", warm, tmp_path / "warm-out", "--to", "nvfp4a16")
    source, out = mixture.write(tmp_path / "in", experts=550), tmp_path / "out"
    assert mixture.weights(experts=550) > 100_000
    limit = ("--max-memory", WIDE)
    peaks = {
        "plan": peak_of("plan", source, "--to", "nvfp4a16", *limit),
        "quantize": peak_of("quantize", source, out, "--to", "nvfp4a16", *limit),
        "inspect": peak_of("inspect", out),
        "verify": peak_of("verify", out, "--against", source, *limit),
    }
    assert all(found < WIDE for found in peaks.values()), peaks
