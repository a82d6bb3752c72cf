"""Neither threads, tiles, memory, delays nor interruptions change a byte of any file."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.checkpoint.interrupted import plan_of, stop_after
from tests.checkpoint.written import digests
from tests.contract.test_vectors import MACHINES
from tests.oracles import synthetic_llama

from zeropoint.checkpoint.plan.limits import BASE_MEMORY, Limits
from zeropoint.checkpoint.run import executor
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.run.unit_results import UnitResult

pytestmark = [pytest.mark.usefixtures("small_units"), pytest.mark.rotating]

WAYS = (
    Limits(workers=1),
    Limits(workers=2, tile_values=3000),
    Limits(workers=7, tile_values=77_777),
    Limits(workers=2, max_memory=BASE_MEMORY + (4 << 20)),
    Limits(workers=7, max_memory=BASE_MEMORY + (21 << 19), tile_values=1 << 30),
)
STOPS = ((), (2,), (0, 7), (30,), (1, 1, 1, 20))
SCHEMES = ("nvfp4a16", "w4a16_asym", "mxfp4", "fp8_block", "float8_e4m3fn:tensor")


def unsteady(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let each unit take its time, so that units end in another order each time."""
    dice, do = random.Random(seed), executor.process

    def slow(*arguments: object) -> UnitResult:
        time.sleep(dice.choice((0, 0, 0.001, 0.005)))
        return do(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "process", slow)


@pytest.mark.parametrize("to", SCHEMES)
def test_every_file_has_the_same_bytes_however_a_run_goes(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = synthetic_llama.write(tmp_path / "in", moe=to == "nvfp4a16")
    run(plan_of(source, to), tmp_path / "golden")
    golden = digests(tmp_path / "golden")
    for number, (limits, stops) in enumerate(zip(WAYS, STOPS, strict=True)):
        unsteady(monkeypatch, number)
        plan, out = plan_of(source, to, limits), tmp_path / str(number)
        for count in stops:
            stop_after(plan, out, count)
        run(plan, out)
        assert digests(out) == golden


@pytest.mark.slow
@pytest.mark.parametrize("to", SCHEMES)
@pytest.mark.parametrize("limits", WAYS, ids=lambda limits: f"{limits.workers}-{limits.tile_values}")
def test_every_file_has_the_same_bytes_wherever_a_run_is_stopped(
    to: str, limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = synthetic_llama.write(tmp_path / "in", moe=True)
    run(plan_of(source, to), tmp_path / "golden")
    golden, plan = digests(tmp_path / "golden"), plan_of(source, to, limits)
    for count in range(0, 60, 3):
        unsteady(monkeypatch, count)
        stop_after(plan, tmp_path / str(count), count)
        run(plan, tmp_path / str(count))
        assert digests(tmp_path / str(count)) == golden


@pytest.mark.slow
@pytest.mark.parametrize("to", SCHEMES)
def test_every_file_has_the_same_bytes_on_a_machine_with_narrower_vectors(to: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in", moe=True)
    narrow = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": MACHINES["x86-64-v2"]}
    for name, machine in (("own", {}), ("narrow", narrow)):
        command = [sys.executable, "-m", "zeropoint", "quantize", str(source), str(tmp_path / name)]
        subprocess.run([*command, "--to", to], env={**os.environ, **machine}, check=True, capture_output=True)
    assert digests(tmp_path / "narrow") == digests(tmp_path / "own")
