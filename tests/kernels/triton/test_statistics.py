"""Statistics and errors on a GPU are those of the reference, sums exactly."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.contract.test_backends import sample_for
from tests.kernels.triton.interpreter import DEVICE

import zeropoint as zp
from zeropoint.kernels.triton import COUNTER
from zeropoint.kernels.triton.statistics_launch import lines_of
from zeropoint.layout.runs import Runs, runs_of
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, kernel_of
from zeropoint.schemes import Granularity
from zeropoint.stats import AbsoluteMean, Histogram, MinMax, Statistic

pytestmark = pytest.mark.rotating

CUTS = (
    ((9000,), Granularity.tensor()), ((96, 70), Granularity.channel(1)), ((6, 96), Granularity.block(1, 32)),
    ((3, 5, 5, 5), Granularity.channel(1)), ((3, 5000), Granularity.channel(0)),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spread(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many exponents, with zeros of both signs and a subnormal number."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
    x.view(-1)[:4] = torch.tensor([-0.0, 0.0, 1e-42, -3e38])
    x = x.to(dtype)
    return torch.where(torch.isfinite(x), x, 1.0)


def assert_same_state(statistic: Statistic, x: torch.Tensor) -> None:
    with zp.only_backend("reference"):
        expected = statistic.measure(x)
    with zp.only_backend("triton"):
        found = statistic.measure(x.to(DEVICE))
    for name, each in expected.items():
        assert torch.equal(found[name].cpu(), each), name


@pytest.mark.parametrize("kind", [MinMax, Histogram, AbsoluteMean])
@pytest.mark.parametrize(("shape", "granularity"), CUTS, ids=str)
def test_statistics_are_those_of_the_reference(
    kind: Callable[..., Statistic], shape: tuple[int, ...], granularity: Granularity
) -> None:
    assert runs_of(granularity, shape) is not None
    statistic = kind(granularity=granularity, shape=shape)
    for dtype in DTYPES:
        x = spread(shape, dtype)
        assert COUNTER.takes(x.to(DEVICE))
        assert_same_state(statistic, x)
        x.view(-1)[7], x.view(-1)[-1] = torch.nan, -torch.inf
        assert_same_state(statistic, x)


@pytest.mark.parametrize("mantissa_bits", [0, 10])
def test_bins_have_any_width(mantissa_bits: int) -> None:
    assert_same_state(Histogram(mantissa_bits=mantissa_bits), spread((9000,), torch.float32))


def test_sums_hold_the_largest_and_the_smallest_numbers_of_a_tile() -> None:
    largest, least = torch.finfo(torch.float32).max, 2.0**-149
    x = torch.tensor([largest] * 3000 + [least] * 3001 + [1.0, -1.0, 2.0**-75])
    limbs = COUNTER.sums(x.to(DEVICE), Runs(1, 1, len(x)))[1].tolist()[0]
    total = sum(limb << 32 * place for place, limb in enumerate(limbs))
    assert total == 3000 * (int(largest) << 149) + 3001 + (2 << 149) + (1 << 74)


def test_small_tensors_have_few_programs_and_no_copies_that_stay_empty() -> None:
    for runs in (Runs(1, 1, 1), Runs(1, 1, 5000), Runs(3, 5, 25), Runs(64, 3, 1), Runs(1, 1, 1 << 40)):
        lines = lines_of(runs)
        numbers = lines.programs * lines.shape.many * lines.shape.size * lines.shape.turns
        assert numbers >= runs.outer * runs.blocks * runs.inner
        assert lines.shape.copies < 2 * lines.programs
        assert lines.programs < 1 << 31


@pytest.mark.parametrize("scheme", [
    "int8:channel", "nvfp4", "uint4:g32:asym", "int3:g32", "nf4:g32",
    *(pytest.param(s, marks=pytest.mark.slow) for s in (
        "uint8:token:asym=real", "mxfp4", "float8_e4m3fn:channel", "int8:tensor", "mxint8", "int8:cast",
        "float8_e4m3fn:block16x32", "q8_0", "int4:g16:scale=signed",
    )),
])  # fmt: skip
def test_errors_are_those_of_the_reference(scheme: str) -> None:
    parsed = zp.Scheme.parse(scheme)
    for shape, dtype in (((4, 256), torch.float32), ((3, 5, 96), torch.bfloat16), ((33, 130), torch.float16)):
        x = sample_for(scheme, shape, dtype)
        if len(parsed.granularity.extents) > len(shape) or shape[-1] % 16:
            continue
        with zp.only_backend("reference"):
            q = zp.quantize(x * 1.25, zp.quantize(x, parsed).params)
        expected = kernel_of(request(Op.MEASURE, x, parsed), "reference").run(
            x * 1.25, q.data, q.params.stored
        )
        here, there = (x * 1.25).to(DEVICE), q.to(DEVICE)
        found = kernel_of(request(Op.MEASURE, here, parsed), "triton").run(
            here, there.data, there.params.stored
        )
        # Squares of float64 are the reference's, and are added in another order.
        np.testing.assert_allclose(found.squares, expected.squares, rtol=1e-14)
        np.testing.assert_allclose(found.errors, expected.errors, rtol=1e-14)
        assert found.largest.tolist() == expected.largest.tolist()
        assert found.clipped.tolist() == expected.clipped.tolist()


def test_no_numbers_have_no_errors() -> None:
    x, scheme = torch.empty(3, 0, device=DEVICE), zp.Scheme.parse("int8:channel")
    found = kernel_of(request(Op.MEASURE, x, scheme), "triton").run(
        x, torch.empty(3, 0, dtype=torch.uint8, device=DEVICE), [torch.ones(3, 1, device=DEVICE)]
    )
    assert found.squares.tolist() == found.largest.tolist() == [0.0] * 3
    assert found.clipped.tolist() == [0] * 3
