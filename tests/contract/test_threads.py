"""Runs of rows over threads: each once, on torch's own team and on threads of Python, whatever fails."""

import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests import processes

import zeropoint as zp
from zeropoint.kernels.cpu.machine.intrinsics import device, kernel
from zeropoint.kernels.cpu.machine.team import run_parts
from zeropoint.ops import threads
from zeropoint.ops.threads import WORTH_A_THREAD, openmp_team, share, thread_limit

THREADS = 3
ROWS = 100
PATIENCE = 500_000_000
"""Turns of a run that waits for others: a second or more, and never all unless one is missing."""


@pytest.fixture(params=["openmp", "python"])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "python":
        monkeypatch.setattr(threads, "openmp_team", lambda: 0)
    elif not openmp_team():
        pytest.skip("torch has no OpenMP runtime here that can be called")
    else:
        monkeypatch.delattr(threads, "_share_in_pool")
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.skipif(
    sys.platform != "linux"
    or platform.machine() != "x86_64"
    or "backend: OpenMP" not in torch.__config__.parallel_info(),
    reason="no OpenMP",
)
def test_the_team_of_torch_is_found() -> None:
    assert openmp_team()


@device
def _visit(seen: Any, here: Any, spins: Any, wanted: Any, first: Any, last: Any) -> Any:
    """Count visits of rows, and wait until as many runs as are wanted are there at once."""
    here[first], present = 1, 0
    while present < wanted and spins[first] < PATIENCE:
        spins[first] += 1
        present = 0
        for row in range(len(here)):
            present += here[row]
    for row in range(first, last):
        seen[row] += 1
    return np.uint8(last)


@kernel
def visit(*args: Any) -> Any:
    return run_parts(_visit, args)


def visited(rows: int, elements: int, wanted: int) -> int:
    """Visit all rows where ``wanted`` threads must be there at once, and return the largest result."""
    seen, here, spins = np.zeros((3, rows), np.int64)
    largest = share(visit, (seen, here, spins, wanted), rows, elements)
    assert bool((seen == 1).all())
    assert int(here.sum()) == wanted
    assert int(spins.max()) < PATIENCE
    return largest


@pytest.mark.parametrize("rows", [1, 2, 3, ROWS])
def test_every_row_is_visited_once_and_the_largest_result_returned(team: str, rows: int) -> None:
    assert visited(rows, rows * WORTH_A_THREAD, min(rows, THREADS)) == rows


def test_few_elements_and_a_limit_of_one_are_one_run(team: str) -> None:
    assert visited(ROWS, WORTH_A_THREAD, 1) == ROWS
    with thread_limit(1):
        assert visited(ROWS, ROWS * WORTH_A_THREAD, 1) == ROWS


def test_a_team_of_fewer_threads_than_parts_does_them_all() -> None:
    for parts, called in ((1, 0), (7, 0), (ROWS, openmp_team()), (ROWS + 5, openmp_team())):
        seen, here, spins = np.zeros((3, ROWS + 1), np.int64)
        assert visit(seen, here, spins, 1, 0, ROWS, parts, called) == ROWS
        assert seen.tolist() == [1] * ROWS + [0]


def test_what_fails_on_a_thread_of_python_is_raised_when_all_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "openmp_team", lambda: 0)
    monkeypatch.setattr(threads, "thread_count", lambda: THREADS)
    ended: list[int] = []

    def work(first: int, last: int, parts: int, team: int) -> int:
        assert (parts, team) == (1, 0)
        if first == 0:
            raise IndexError("the first run")
        time.sleep(0.05)
        ended.append(last)
        return 0

    with pytest.raises(IndexError, match="the first run"):
        share(work, (), ROWS, ROWS * WORTH_A_THREAD)
    assert len(ended) == THREADS - 1


def test_callers_at_once_get_their_own_results(team: str) -> None:
    x = [torch.randn(512, 1024, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    with thread_limit(1):
        expected = [zp.quantize(part, "int4:g32").data for part in x]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            found = pool.map(lambda part: zp.quantize(part, "int4:g32").data, x)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


FLUSHING = """
import sys, torch, zeropoint as zp
from zeropoint.ops import threads
from zeropoint.ops.threads import WORTH_A_THREAD
if sys.argv[1] == "python":
    threads.openmp_team = lambda: 0
torch.set_num_threads(1)
# Scales are no smaller than 2**-126, so this is 1 of them, and nothing where it is flushed.
x = torch.full((12, WORTH_A_THREAD), 0.75 * 2.0**-126)
q = zp.quantize(x, "int8:channel")
values = zp.dequantize(q)
tiny = torch.full((1 << 21,), 2.0**-130)
assert bool((q.codes == 1).all())
# Threads that begin in flushing mode keep it, also after a call of ours.
torch.set_flush_denormal(True)
torch.set_num_threads(3)
torch.randn(1 << 20).exp().sum()
again = zp.quantize(x, "int8:channel")
found = zp.dequantize(q)
flushed = tiny * 0.5
torch.set_flush_denormal(False)
assert torch.equal(again.data, q.data) and torch.equal(again.scales[0], q.scales[0])
assert torch.equal(found, values)
assert not flushed.view(torch.int32).any()
"""


def test_the_threads_of_a_team_compute_with_subnormal_numbers(team: str) -> None:
    done = processes.run(FLUSHING, team)
    assert done.returncode == 0, done.stderr


FORKING = """
import os, torch, zeropoint as zp
torch.set_num_threads(2)
x = torch.randn(1024, 1024)
expected = zp.quantize(x, "int8:channel").data.numpy().tobytes()
child = os.fork()
# An operator of torch that is worth its threads would wait in the child for those that are not there.
found = zp.quantize(x, "int8:channel").data.numpy().tobytes()
if found != expected:
    os._exit(1)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_does_without_the_team() -> None:
    done = processes.run(FORKING)
    assert done.returncode == 0, done.stderr
