"""Transposed tensors, and blocks that span rows, are quantized where they lie, to the reference's bytes."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.contract.test_backends import sample_for
from tests.kernels.triton.interpreter import DEVICE
from tests.kernels.triton.test_schemes import OTHERS, QUICK
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.kernels.triton import BACKEND, starts
from zeropoint.kernels.triton.tile_cuts import contiguous_strides, tiles_of
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, kernel_of

pytestmark = pytest.mark.rotating

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (
    "float8_e4m3fn:block16x32", "float8_e4m3fn:block128x128", "int8:block32x1", "mxfp4:block16x16",
    "uint4:block16x16:asym", "int8:block4x48", "int4:channel-1", "uint8:channel-1:asym=real",
)  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the programs that were started."""
    names, call = set[str](), starts.Start.__call__

    def noted(self: starts.Start, *tensors: torch.Tensor, **rest: Any) -> None:
        names.add(self._name)
        call(self, *tensors, **rest)

    monkeypatch.setattr(starts.Start, "__call__", noted)
    return names


def transposed(scheme: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose columns are rows of memory."""
    return sample_for(scheme, shape, dtype).mT.contiguous().mT


def calls(x: torch.Tensor, scheme: zp.Scheme) -> Iterator[tuple[Op, tuple[Any, ...], list[torch.Tensor]]]:
    """Yield operators with the arguments behind the tensor, and the results of the reference."""
    with zp.only_backend("reference"):
        q = zp.quantize(x.contiguous(), scheme)
        rounded = zp.fake_quantize(x.contiguous(), q.params)
    given = [each.to(DEVICE) for each in q.params.stored]
    yield Op.QUANTIZE_DYNAMIC, (), [q.data, *q.params.stored]
    yield Op.QUANTIZE, (given,), [q.data]
    yield Op.FAKE_QUANTIZE, (given,), [rounded]


def assert_same_bytes(x: torch.Tensor, scheme: zp.Scheme) -> int:
    """Compare what the backend takes with the reference, and return the number of operators.

    Of contiguous tensors, the operators under given scales have tests of their own.
    """
    taken, here = 0, x.to(DEVICE)
    assert here.stride() == x.stride()
    for op, arguments, expected in calls(x, scheme):
        if BACKEND.refusal(request(op, here, scheme)) is not None or (here.is_contiguous() and arguments):
            continue
        found = kernel_of(request(op, here, scheme), "triton").run(here, *arguments)
        results = [found[0], *found[1]] if op is Op.QUANTIZE_DYNAMIC else [found]
        assert all(same_bytes(a.cpu(), b) for a, b in zip(results, expected, strict=True)), (op, x.stride())
        taken += 1
    return taken


@pytest.mark.parametrize("scheme", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)])
def test_transposed_tensors_are_quantized_where_they_lie(scheme: str, started: set[str]) -> None:
    parsed, taken, dtypes = zp.Scheme.parse(scheme), 0, itertools.cycle(DTYPES)
    for shape, dtype in zip([(64, 128), (37, 70), (3, 20, 32)], dtypes, strict=False):
        taken += assert_same_bytes(transposed(scheme, shape, dtype), parsed)
    assert taken >= 6
    # A tensor of one block is one axis, whose numbers come in any order; others are read as they lie.
    assert {name.split(".")[0] for name in started} <= {"matrix_tiles", "held_scales", "whole_tensors"} or (
        parsed.granularity.extents == ()
    )


@pytest.mark.parametrize(
    "scheme", [BLOCKS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in BLOCKS[1:])]
)
def test_blocks_that_span_rows_take_no_extremes_on_the_host(scheme: str, started: set[str]) -> None:
    parsed, taken, dtypes = zp.Scheme.parse(scheme), 0, itertools.cycle(DTYPES)
    for shape, dtype in zip([(34, 67), (32, 128), (2, 48, 40)], dtypes, strict=False):
        taken += assert_same_bytes(sample_for(scheme, shape, dtype), parsed)
        taken += assert_same_bytes(transposed(scheme, shape, dtype), parsed)
    assert taken >= 8
    assert "segments.segment_extremes" not in started


@pytest.mark.parametrize(
    "scheme", ["int8:channel", pytest.param("uint8:token:asym=real", marks=pytest.mark.slow)]
)
def test_blocks_that_no_tile_holds_are_read_twice(scheme: str, started: set[str]) -> None:
    parsed = zp.Scheme.parse(scheme)
    assert assert_same_bytes(transposed(scheme, (17, 2060), torch.bfloat16), parsed) == 3
    assert assert_same_bytes(sample_for(scheme, (2, 33000), torch.float32), parsed) == 1
    assert {"matrix_tiles.tile_extremes", "matrix_tiles.block_scales", "pieces.quantize_pieces"} <= started
    assert "segments.segment_extremes" not in started


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "int8:channel", "float8_e4m3fn:block16x32"])
def test_views_with_gaps_and_of_several_matrices_have_the_bytes_of_the_reference(scheme: str) -> None:
    base, parsed = sample_for(scheme, (70, 200), torch.bfloat16), zp.Scheme.parse(scheme)
    for view in (base[:, 3:131].t(), base[:, 3:131], base.view(5, 14, 200).mT, base.view(5, 14, 200)[::2].mT):
        kept = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype)
        taken = assert_same_bytes(kept.copy_(view), parsed)
        assert taken == 3 or (taken == 0 and view.ndim == 3 and parsed.granularity.extents == (16, 32))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("scheme", ["mxfp4", "int8:block32x1", "int8:channel"])
def test_numbers_that_are_not_finite_are_refused_with_their_place(scheme: str, bad: float) -> None:
    x = torch.ones(4096, 4).t()
    x[2, 33] = bad
    with zp.only_backend("triton"):
        with pytest.raises(zp.NonFiniteError, match=r"at \(2, 33\)"):
            zp.quantize(x.to(DEVICE), scheme)
        params = zp.quantize(torch.ones(4096, 4).t().to(DEVICE), scheme).params
        with pytest.raises(zp.NonFiniteError, match=r"at \(2, 33\)"):
            zp.quantize(x.to(DEVICE), params)


@pytest.mark.parametrize("scheme", ["mxfp8_e4m3", "nvfp4", "int8:tensor", "int8:channel", "int8:block32x1"])
def test_a_plan_reads_a_transposed_tensor_where_it_lies(scheme: str, started: set[str]) -> None:
    shape = (8, 4096)
    x = transposed(scheme, shape, torch.bfloat16)
    here = x.to(DEVICE)
    with zp.only_backend("reference"):
        expected = zp.quantize(x.contiguous(), scheme)
        rounded = zp.fake_quantize(x.contiguous(), expected.params)

    def plan(op: str, source: Any) -> zp.prepared.Plan:
        made = zp.plan(op, source, shape, x.dtype, strides=x.stride(), device=DEVICE, backend="triton")
        assert made.allocates is None
        assert made.workspace_bytes < x.nbytes
        return made

    quantize = plan("quantize", scheme)
    q = quantize.empty()
    for _ in range(2):  # the second run finds what the first one left in the workspace
        q.data.zero_()
        quantize.run(here, out=q)
        quantize.synchronize()
        assert same_bytes(q.data.cpu(), expected.data)
        assert all(same_bytes(a.cpu(), b) for a, b in zip(q.scales, expected.scales, strict=True))
    params = expected.params.to(DEVICE)
    assert same_bytes(plan("quantize", params).run(here).data.cpu(), expected.data)
    assert same_bytes(plan("fake_quantize", params).run(here).cpu(), rounded)


def test_axes_that_follow_each_other_are_one() -> None:
    group = zp.Granularity.group(32)
    made = tiles_of(group, (6, 10, 64, 96), contiguous_strides((6, 10, 64, 96)), 8, 2, whole=True)
    assert made is not None
    assert (made.cut.rows, made.cut.cols, made.programs) == (1, 6 * 10 * 64 * 96, 45)
    batches = tiles_of(group, (1 << 12, 1 << 10, 1 << 10), (1 << 20, 1, 1 << 10), 4, 2, whole=True)
    assert batches is not None
    assert (batches.cut.batch, batches.cut.rows, batches.shape.transposed) == (1 << 20, 1 << 10, True)
    assert tiles_of(group, (4, 8, 64), (64, 1024, 8), 8, 2, whole=True) is None


def test_a_block_is_whole_in_a_tile_that_reads_sectors_or_in_none() -> None:
    token, shape = zp.Granularity.token(), (4096, 2048)
    made = tiles_of(token, shape, (1, 4096), 8, 2, whole=True)
    assert made is not None
    assert (made.shape.rows, made.shape.cols, made.warps) == (16, 2048, 16)
    assert tiles_of(token, (4096, 2049), (1, 4096), 8, 2, whole=True) is None
    parts = tiles_of(token, (4096, 2049), (1, 4096), 8, 2, whole=False)
    assert parts is not None
    assert (parts.shape.rows, parts.shape.cols) == (64, 128)
