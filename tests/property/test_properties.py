"""Properties that hold for any scheme and data, both drawn by hypothesis."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zeropoint as zp
from zeropoint.schemes import PRESETS as NAMED

pytestmark = pytest.mark.rotating

Property = Callable[[st.DataObject], None]
FEW = settings(max_examples=4, deadline=None, derandomize=True, database=None)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
SWEEP = settings(max_examples=10_000, deadline=None, database=None)
searched = pytest.mark.parametrize(
    "search", [QUICK, pytest.param(SWEEP, marks=pytest.mark.slow)], ids=["quick", "sweep"]
)
"""The same examples in every quick run, others in every sweep."""
PRESETS = list(dict.fromkeys(preset.weight for preset in NAMED.values()))
SCHEMES = [
    *PRESETS,
    "int8:tensor", "int8:channel:narrow", "int4:token", "uint8:tensor:asym", "int4:g3:asym", "uint2:g5:asym",
    "uint5:channel1:asym=real", "int16:tensor", "float8_e5m2:channel", "float8_e4m3fnuz:g7",
    "float6_e2m3fn:g8",
    "int8:g4:scale=float16", "int8:g4:scale=linear_up/bfloat16", "float8_e4m3fn:g4:scale=rceil",
    "float4_e2m1fn:g4:scale=even", "float4_e2m1fn:g4:scale=ceil", "int8:channel:dialect=torch",
    "uint8:channel:asym:dialect=torch", "int8:tensor:asym:dialect=burn", "uint8:channel:asym:dialect=onnx",
    "int4:g8:round=floor", "int4:g8:round=ceil", "int4:g8:round=toward_zero", "int4:g8:round=half_away",
    "int4:g8:round=half_up", "int4:g8:round=stochastic(5)", "float8_e4m3fn:g8:round=toward_zero",
    "float4_e2m1fn:g8:round=stochastic(2)", "float4_e2m1fn:g8:round=floor", "ternary:g8", "binary:g8",
]  # fmt: skip
# Largest magnitude drawn: below it neither float16 values nor float16 scales overflow on the way back.
LIMIT = {torch.float32: 2.0**120, torch.float64: 2.0**120, torch.bfloat16: 2.0**120, torch.float16: 2.0**14}
DTYPES = st.sampled_from(list(LIMIT))


@st.composite
def matrices(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """Draw a small matrix of ``dtype`` whose rows may differ wildly in magnitude."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    seed, spread = draw(st.integers(0, 2**31 - 1)), draw(st.sampled_from([0.0, 2.0, 8.0, 30.0]))
    center = draw(st.sampled_from([0, 0, 0, 5, 12, -10, -20, -60, 100]))
    offset = draw(st.sampled_from([0.0, 0.0, 3.0, -3.0]))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) + offset
    x *= torch.exp2((torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 2 - 1) * spread)
    x *= 2.0**center
    x[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    return x.clamp(-LIMIT[dtype], LIMIT[dtype]).to(dtype)


def spread_bound(q: zp.QuantizedTensor) -> torch.Tensor:
    """Return the bound of every element."""
    return spread(q, q.error_bound())


def spread(q: zp.QuantizedTensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of blocks for each value."""
    for axis, size in enumerate(q.params.block_size):
        if numbers.shape[axis] > 1:
            numbers = numbers.repeat_interleave(size, axis).narrow(axis, 0, q.shape[axis])
    return numbers.expand(q.shape)


def quantized(x: torch.Tensor, scheme: str) -> zp.QuantizedTensor | None:
    """Return ``x`` quantized, or None where a narrow scale cannot hold what the data need."""
    try:
        return zp.quantize(x, scheme)
    except zp.RangeError:
        formats = (level.format for level in zp.Scheme.parse(scheme).scales)
        assert any(fmt is None or float(fmt.smallest) > 2.0**-126 for fmt in formats)
        return None


def search_for_a_counterexample(property_: Property, search: settings) -> None:
    """Call ``property_`` with as many drawn examples as ``search`` says."""
    search(given(st.data())(property_))()


def drawn(
    data: st.DataObject, schemes: list[str], dtypes: st.SearchStrategy[torch.dtype] = DTYPES
) -> tuple[str, torch.Tensor]:
    """Draw a scheme and a matrix."""
    scheme = data.draw(st.sampled_from(schemes))
    return scheme, data.draw(dtypes.flatmap(matrices))


@searched
def test_the_error_is_within_the_proven_bound(search: settings) -> None:
    def holds(data: st.DataObject) -> None:
        scheme, x = drawn(data, SCHEMES)
        q = quantized(x, scheme)
        if q is None:
            return
        error = (q.dequantize().double() - x.double()).abs()
        assert bool((error <= spread_bound(q)).all()), (error - spread_bound(q)).max()

    search_for_a_counterexample(holds, search)


@searched
def test_fake_quantize_is_quantize_then_dequantize(search: settings) -> None:
    def holds(data: st.DataObject) -> None:
        scheme, x = drawn(data, SCHEMES)
        q = quantized(x, scheme)
        if q is None:
            return
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
        assert torch.equal(zp.fake_quantize(x, scheme).view(width), q.dequantize().view(width))
        if "_late" not in scheme:  # those give other codes under the scales as they are stored
            assert torch.equal(zp.fake_quantize(x, q.params).view(width), q.dequantize().view(width))
            assert torch.equal(zp.quantize(x, q.params).data, q.data)

    search_for_a_counterexample(holds, search)


# Not where rounding is directed or random, which moves a value that lies next to its grid point by one
# rounding, nor where a zero point is real or added inside the rounding.
STABLE = [
    s for s in SCHEMES
    if not any(part in s for part in ("round=", "asym=real", "dialect=burn", "dialect=compressed-tensors"))
]  # fmt: skip
IN_FLOAT32 = st.just(torch.float32)


@searched
def test_quantizing_dequantized_values_again_returns_the_codes(search: settings) -> None:
    """With the same parameters, in float32.

    It need not hold with new parameters: their scale shrinks where the largest value was clipped or rounded.
    """

    def holds(data: st.DataObject) -> None:
        scheme, x = drawn(data, STABLE, IN_FLOAT32)
        q = quantized(x, scheme)
        if q is None:
            return
        again = zp.quantize(q.dequantize(), q.params)
        assert torch.equal(zp.dequantize(again), q.dequantize())
        # Codes of one value are one code, but of 0, and of blocks whose late scale is stored as 0.
        distinct = q.dequantize() != 0
        if "_late" in scheme:
            distinct &= spread(q, q.scales[0]) != 0
        assert torch.equal(again.codes[distinct], q.codes[distinct])

    search_for_a_counterexample(holds, search)


@searched
def test_larger_values_never_get_smaller_results(search: settings) -> None:
    def holds(data: st.DataObject) -> None:
        scheme, x = drawn(data, [s for s in SCHEMES if "stochastic" not in s], IN_FLOAT32)
        q = quantized(x, scheme)
        if q is None:
            return
        line = torch.linspace(float(x.min()), float(x.max()), 16)
        for row, column in ((0, 0), (x.shape[0] - 1, x.shape[1] - 1)):
            column_of_line = x.repeat(16, 1, 1)
            column_of_line[:, row, column] = line
            values = torch.stack([zp.fake_quantize(y, q.params)[row, column] for y in column_of_line])
            assert bool((values[1:] >= values[:-1]).all())

    search_for_a_counterexample(holds, search)


@FEW
@given(st.integers(0, 2**31 - 1), st.integers(1, 3000))
def test_stochastic_rounding_depends_on_the_seed_and_the_index_alone(seed: int, count: int) -> None:
    x = torch.linspace(-7, 7, 3000)
    params = zp.QuantizationParams.new(1.0, 0, f"int4:tensor:round=stochastic({seed})")
    whole = zp.quantize(x, params).codes
    assert torch.equal(zp.quantize(x, params).codes, whole)
    assert torch.equal(zp.quantize(x[:count].contiguous(), params).codes, whole[:count])
    assert torch.equal(zp.quantize(x.reshape(3, 1000), params).codes.flatten(), whole)


@pytest.mark.crossed
@pytest.mark.parametrize("seed", [0, 2**31 - 1])
@pytest.mark.parametrize("part", [0.001, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("base", [-3.0, 0.0, 2.0])
def test_stochastic_rounding_is_unbiased(seed: int, part: float, base: float) -> None:
    """Of n independent draws, by Hoeffding, the mean is off by more than t with probability 2 exp(-2 n t**2).

    With n = 2**18 and t = sqrt(ln(2e12) / (2 n)) that is 1e-12 for each case.
    """
    count = 1 << 18
    params = zp.QuantizationParams.new(1.0, 0, f"int4:tensor:round=stochastic({seed})")
    value = torch.tensor(base + part)
    codes = zp.quantize(value.repeat(count), params).codes.double()
    low = math.floor(float(value))
    assert set(codes.unique().tolist()) <= {low, low + 1}
    assert abs(float(codes.mean()) - float(value)) < math.sqrt(math.log(2e12) / (2 * count))


@pytest.mark.parametrize("seed", [0, 7])
def test_stochastic_rounding_of_neighbors_is_uncorrelated(seed: int) -> None:
    """The products of n independent signs have a mean within six standard deviations, 6 / sqrt(n), of 0."""
    count = 1 << 18
    params = zp.QuantizationParams.new(1.0, 0, f"int4:tensor:round=stochastic({seed})")
    signs = zp.quantize(torch.full((count,), 0.5), params).codes.double() * 2 - 1
    for lag in (1, 2, 3, 4, 8, 16, 32, 64, 1024):
        assert abs(float((signs[lag:] * signs[:-lag]).mean())) < 6 / math.sqrt(count - lag)


def test_different_seeds_round_differently() -> None:
    x = torch.full((1000,), 0.5)
    schemes = [f"int4:tensor:round=stochastic({seed})" for seed in range(20)]
    runs = [zp.quantize(x, zp.QuantizationParams.new(1.0, 0, scheme)).codes for scheme in schemes]
    assert len({tuple(codes.tolist()) for codes in runs}) == 20


@FEW
@given(st.integers(1, 40), st.integers(1, 40))
def test_blocks_are_independent_of_each_other(first: int, second: int) -> None:
    generator = torch.Generator().manual_seed(first * 100 + second)
    x = torch.randn(first + second, 48, generator=generator)
    for scheme in ("mxfp4", "int4:g16:asym", "mx9", "nf4:g16"):
        whole = zp.quantize(x, scheme)
        parts = [zp.quantize(x[:first], scheme), zp.quantize(x[first:], scheme)]
        assert torch.equal(whole.data, torch.cat([part.data for part in parts]))
