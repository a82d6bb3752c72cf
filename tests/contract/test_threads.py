"""Runs of rows over threads: each once, on torch's own team and on threads of Python, whatever fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import zeropoint as zp
from zeropoint.ops import threads
from zeropoint.ops.openmp import openmp_team
from zeropoint.ops.threads import WORTH_A_THREAD, over_rows, thread_limit

THREADS = 3
ROWS = 100


@pytest.fixture(params=["openmp", "python"])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "python":
        monkeypatch.setattr(threads, "openmp_team", lambda: None)
    elif openmp_team() is None:
        pytest.skip("torch has no OpenMP runtime here that can be called")
    else:
        monkeypatch.delattr(threads, "_pool_team")
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.skipif(
    sys.platform != "linux" or "backend: OpenMP" not in torch.__config__.parallel_info(), reason="no OpenMP"
)
def test_the_team_of_torch_is_found() -> None:
    assert openmp_team() is not None


@pytest.mark.parametrize("rows", [1, 2, 3, ROWS])
def test_every_row_is_visited_once_and_the_largest_result_returned(team: str, rows: int) -> None:
    seen: list[int] = []
    idents: set[int] = set()

    def work(first: int, last: int) -> int:
        idents.add(threading.get_ident())
        time.sleep(0.01)  # so that nobody takes what was meant for another
        seen.extend(range(first, last))
        return last

    assert over_rows(rows, rows * WORTH_A_THREAD, work) == rows
    assert sorted(seen) == list(range(rows))
    assert len(idents) == min(rows, THREADS)


def test_what_fails_is_raised_when_all_have_ended(team: str) -> None:
    ended: list[int] = []

    def work(first: int, last: int) -> int:
        if first == 0:
            raise IndexError("the first run")
        time.sleep(0.05)
        ended.append(last)
        return 0

    with pytest.raises(IndexError, match="the first run"):
        over_rows(ROWS, ROWS * WORTH_A_THREAD, work)
    assert len(ended) == THREADS - 1
    assert over_rows(ROWS, ROWS * WORTH_A_THREAD, lambda *run: run[1]) == ROWS


def test_few_elements_and_a_limit_of_one_stay_in_the_calling_thread(team: str) -> None:
    def work(first: int, last: int) -> int:
        assert threading.get_ident() == caller
        return last - first

    caller = threading.get_ident()
    assert over_rows(ROWS, WORTH_A_THREAD, work) == ROWS
    with thread_limit(1):
        assert over_rows(ROWS, ROWS * WORTH_A_THREAD, work) == ROWS


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
    threads.openmp_team = lambda: None
torch.set_num_threads(1)
# Scales are no smaller than 2**-126, so this is 1 of them, and nothing where it is flushed.
x = torch.full((12, WORTH_A_THREAD), 0.75 * 2.0**-126)
q = zp.quantize(x, "int8:channel")
values = zp.dequantize(q)
assert bool((q.codes == 1).all())
# Threads that begin in flushing mode keep it.
torch.set_flush_denormal(True)
torch.set_num_threads(3)
torch.randn(1 << 20).exp().sum()
again = zp.quantize(x, "int8:channel")
found = zp.dequantize(q)
torch.set_flush_denormal(False)
assert torch.equal(again.data, q.data) and torch.equal(again.scales[0], q.scales[0])
assert torch.equal(found, values)
"""


def test_the_threads_of_a_team_compute_with_subnormal_numbers(team: str) -> None:
    done = subprocess.run([sys.executable, "-c", FLUSHING, team], timeout=120, check=False)
    assert done.returncode == 0


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
    done = subprocess.run([sys.executable, "-c", FORKING], timeout=120, check=False)
    assert done.returncode == 0
