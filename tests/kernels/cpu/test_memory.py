"""Memory of large results: used again once nothing refers to it, never before, and only so much is kept."""

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import zeropoint as zp
from zeropoint.kernels.cpu.decode.rows import STREAMED
from zeropoint.kernels.cpu.host import memory
from zeropoint.ops.threads import thread_limit

pytestmark = pytest.mark.skipif(not memory._AVAILABLE, reason="the system has no such advice about memory")
COUNT = memory.LARGE
"""Bytes of the smallest result whose memory is kept."""


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "_kept", [])
    return


def _bytes() -> torch.Tensor:
    return memory.empty((COUNT,), torch.uint8)


def test_memory_of_a_released_result_is_used_again() -> None:
    first = _bytes()
    place = first.data_ptr()
    del first
    second = _bytes()
    assert second.data_ptr() == place
    assert memory._kept == []


def test_memory_of_another_size_is_kept() -> None:
    _bytes()
    assert len(memory._kept) == 1
    memory.empty((2 * COUNT,), torch.uint8)
    assert sorted(map(len, memory._kept)) == [COUNT, 2 * COUNT]


def test_memory_is_not_used_again_as_long_as_a_view_of_it_lives() -> None:
    for view in (
        lambda x: x[-1:],
        lambda x: x.view(torch.float32)[5:],
        lambda x: x.numpy()[3:],
        lambda x: x.untyped_storage(),
        torch.Tensor.detach,
    ):
        held = view(_bytes())
        assert memory._kept == []
        del held
        assert len(memory._kept) == 1
        memory._kept.clear()


def test_no_more_is_kept_than_the_limit_and_what_is_oldest_goes_first() -> None:
    results = [memory.empty((memory.KEPT // 4 + n,), torch.uint8) for n in range(8)]
    first = results.pop(0).numel()
    assert first
    while results:
        results.pop(0)
        assert sum(map(len, memory._kept)) <= memory.KEPT
    assert len(memory._kept) >= 2


def test_a_result_above_the_limit_is_given_back_at_once() -> None:
    memory.empty((memory.KEPT + 1,), torch.uint8)
    assert memory._kept == []


def test_pages_that_the_system_took_back_are_there_again() -> None:
    first = _bytes().fill_(7)
    del first
    memory._kept[0].madvise(mmap.MADV_DONTNEED)
    assert bool((_bytes().fill_(3) == 3).all())


def test_results_of_many_threads_never_share_memory() -> None:
    def work(number: int) -> bool:
        for _ in range(40):
            mine = _bytes()[:: 1 << 12]
            mine.fill_(number)
            if not bool((mine == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("size", [0, 1, COUNT - 1])
def test_small_results_come_from_torch(size: int) -> None:
    assert memory.empty((size,), torch.uint8).numel() == size
    assert memory._kept == []


def test_where_the_system_takes_no_advice_memory_comes_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_AVAILABLE", False)
    assert _bytes().numel() == COUNT
    assert memory._kept == []


def test_results_in_used_memory_are_those_in_new_memory() -> None:
    x = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(5))
    first = zp.quantize(x, "int8:channel")
    values = first.dequantize().clone()
    for _ in range(3):
        assert torch.equal(zp.quantize(x, "int8:channel").dequantize(), values)
    assert memory._kept


def test_workers_that_count_their_memory_keep_none() -> None:
    with thread_limit(1):
        _bytes()
    assert memory._kept == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scheme", ["int4:g128", "uint4:g128:asym", "nf4", "mxfp4", "nvfp4", "float8_e4m3fn:channel", "mx6"]
)
def test_results_that_bypass_the_cache_have_the_values_of_small_ones(scheme: str, dtype: torch.dtype) -> None:
    rows, columns = int(STREAMED) // dtype.itemsize // 4096, 4096
    few = zp.quantize(torch.randn(8, columns, generator=torch.Generator().manual_seed(0)), scheme)
    values = few.dequantize(dtype)
    params = [p if p.numel() == 1 else p.repeat(rows // 8, 1) for p in few.params.stored]
    x = torch.empty(rows, columns, dtype=dtype)
    same = zp.QuantizationParams.of(few.params.scheme, (rows, columns), few.params.dtype, params)
    many = replace(few, data=few.data.repeat(rows // 8, 1), params=same, shape=(rows, columns))
    moved = torch.empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
    for out in (x, moved):
        assert torch.equal(
            zp.dequantize(many, out=out).view(-1, 8, columns), values.expand(rows // 8, -1, -1)
        )
