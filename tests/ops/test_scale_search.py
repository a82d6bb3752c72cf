"""Scales of least error: against all scales that there are, tried one by one in NumPy."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.errors import NonFiniteError, UnsupportedError
from zeropoint.formats import Format, get_format
from zeropoint.functional import quantize_part
from zeropoint.layout.blocks import spread_blocks, sum_blocks
from zeropoint.methods import method_named
from zeropoint.ops import reference
from zeropoint.ops.block_errors import powers
from zeropoint.ops.threads import thread_limit
from zeropoint.params.scale_windows import window_of
from zeropoint.schemes import Scheme

pytestmark = pytest.mark.rotating

ELEMENTS = (
    "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "e3m0", "e2m2", "int2", "int3", "int4", "int8", "int8_mx", "uint4", "nf4", "fp4_bnb",
    "iq4", "ternary", "binary",
)  # fmt: skip
SCALES = ("ue4m3", "ue5m3", "e8m0", "float8_e4m3fn", "float8_e5m2", "e3m4")
OFF, SMALL = 2.0**-16, 2.0**-40
"""What quotients in float32, rounded near a middle of codes, add to an error, relative and of squares."""
DECODED = 2.0**-23
"""What products in float32 are off by, relatively."""


def numbers(fmt: Format) -> np.ndarray:
    """Return the finite values of a format, from its exact definition."""
    found = {number for code in range(fmt.code_count) if isinstance(number := fmt.number(code), Fraction)}
    return np.array(sorted({0.0 if value == 0 else float(value) for value in found}))


def exact_errors(x: np.ndarray, factors: np.ndarray, values: np.ndarray, power: float) -> np.ndarray:
    """Return the error of each block (rows of ``x``) under each factor, of the closest values in float64."""
    middles = (values[1:] + values[:-1]) / 2
    result = np.empty((len(x), len(factors)))
    for column, factor in enumerate(factors):
        closest = values[np.searchsorted(middles, x / factor)] * factor
        result[:, column] = (np.abs(x - closest) ** power).sum(1)
    return result


def blocks(size: int, *, count: int, unsigned: bool = False, seed: int = 0) -> torch.Tensor:
    """Return blocks of many kinds: normal, heavy tails, outliers, ties, constants, grids, zeros."""
    make = np.random.default_rng(seed)
    rows = [
        make.standard_normal((count, size)), make.standard_t(2, (count, size)),
        make.laplace(size=(count, size)),
        make.integers(-12, 13, (count, size)) / 2, make.choice([-1.0, 0.5, 0.25, 1.5, 3.0], (count, size)),
        np.sign(make.standard_normal((count, size))), make.standard_normal((count, size)) ** 5,
    ]  # fmt: skip
    outlier = make.standard_normal((count, size))
    outlier[:, 0] *= 40
    rows += [
        outlier,
        np.zeros((1, size)),
        np.full((1, size), 0.3),
        np.exp2(make.integers(-9, 1, (count, size))),
    ]
    x = torch.tensor(np.concatenate(rows), dtype=torch.float32)
    return x.abs() if unsigned else x


def failures(element: str, scale: str, size: int, power: float, count: int) -> list[str]:
    """Compare the rule with every scale of a format, of blocks whose scales are all over it.

    Returns what is wrong: blocks for which another scale has less error, and that none beats its start.
    """
    rule = "search" if power == 2 else f"search{power:g}"
    scheme = Scheme.parse(f"{element}:g{size}:scale={rule}/{scale}")
    values = numbers(scheme.element)
    factors = numbers(get_format(scale))
    factors = factors[factors > 0]
    x = blocks(size, count=count, unsigned=bool(scheme.element.min >= 0))
    # Not so large that values of codes overflow float32, nor so small that quotients of numbers are
    # subnormal.
    ends = math.log2(max(factors[0], 2.0**-80)), math.log2(min(factors[-1], 2.0**100))
    spot = np.exp2(np.random.default_rng(1).uniform(*ends, (len(x), 1)))
    largest = x.abs().amax(1, keepdim=True).clamp(min=1e-3)
    x = (x / largest * torch.tensor(spot * float(scheme.divisor) * 0.9)).float()
    x = torch.where(torch.isfinite(x), x, 0.0)
    q = zp.quantize(x, scheme)
    kept = q.params.effective_scale()
    assert kept is not None
    exponent = round(power * 1024) / 1024
    errors = exact_errors(x.double().numpy(), factors, values, exponent)
    place = np.searchsorted(factors, kept.double().reshape(-1).numpy())
    mine = errors[np.arange(len(x)), place]
    slack = SMALL * (np.abs(x.double().numpy()) ** exponent).sum(1)
    # Decoded values are products that float32 holds, so that roots of errors may be off by that.
    norms = (np.abs(x.double().numpy()) ** exponent).sum(1) ** (1 / exponent)
    reached = (errors.min(1) ** (1 / exponent) + DECODED * norms) ** exponent
    worse = mine > reached * (1 + OFF) + slack
    # A block of zeros keeps its start, also where 0 is not among the values.
    worse &= (x != 0).any(1).numpy()
    found = [
        f"{x[block].tolist()}: {factors[place[block]]}, not {factors[errors[block].argmin()]}"
        for block in np.flatnonzero(worse)
    ]
    start = zp.quantize(x, scheme.start).params.effective_scale()
    assert start is not None
    own = np.searchsorted(factors, start.double().reshape(-1).numpy()) % len(factors)
    gains = errors[np.arange(len(x)), own] > mine * 1.0001 + slack
    # Doubling leaves nearly all values of formats with many exponents, and one magnitude needs no choice; of
    # powers of two the start is that which clips nothing, and eight bits hardly ever gain from clipping.
    fine = element in ("binary", "float8_e5m2", "float8_e5m2fnuz") or (
        scale == "e8m0" and element.startswith("int8") and size >= 64
    )
    if not gains.any() and not fine:
        found.append("no block is better than under its start")
    return found


@pytest.mark.parametrize("element", ELEMENTS)
def test_no_scale_of_all_has_less_error_than_the_one_that_is_found(element: str) -> None:
    assert failures(element, "ue4m3", 16, 2, 6) == []
    assert failures(element, "e8m0", 32, 2, 6) == []


@pytest.mark.parametrize("power", [1, 1.5, 2.4, 4])
def test_the_same_holds_for_other_powers(power: float) -> None:
    assert failures("float4_e2m1fn", "ue4m3", 16, power, 4) == []
    assert failures("int4", "e8m0", 24, power, 4) == []


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_the_same_holds_for_every_element_under_every_scale(element: str, scale: str) -> None:
    for size, count in ((3, 40), (16, 40), (64, 20), (200, 8)):
        for power in (2, 3, 1.25):
            assert failures(element, scale, size, power, count) == []


def nvfp4(unit: list[float], code: int) -> torch.Tensor:
    """Return a block of so many steps of the scale ``code`` of e4m3."""
    step = 2.0 ** (code // 8 - 7) * (1 + code % 8 / 8)
    return torch.tensor([unit]) * step


LOWEST = [7.359375, 3.0, 6.0, 0.5, 6.0, 6.0, 0.5, 6.0, 1.5, 1.5, 4.0, 4.0, 1.5, 6.0, 1.5, 1.5]
HIGHEST = [3.53125, 0.5, 3.0, 1.5, 3.0, 2.0, 3.0, 2.0, 3.0, 1.5, 0.5, 1.5, 3.0, 1.5, 1.5, 3.0]


@pytest.mark.parametrize(("unit", "code", "away"), [(LOWEST, 68, -3), (HIGHEST, 64, 7)])
def test_both_ends_of_the_window_of_nvfp4_are_reached(unit: list[float], code: int, away: int) -> None:
    x = nvfp4(unit, code)
    found, start = (
        int(zp.quantize(x, f"e2m1:g16:scale={rule}").params.scales[0].view(torch.uint8)[0, 0])
        for rule in ("search/ue4m3", "ue4m3")
    )
    assert (found, found - start) == (code, away)


def test_the_windows_are_those_that_others_found() -> None:
    window = window_of(Scheme.parse("nvfp4"), 16, 2.0)
    assert (window.halving, window.most) == (3.5, 6.0)
    # (y - 6)^2 - (y - 8)^2 = 15 / 4, where 15 numbers lose a quarter each.
    assert window.doubling == pytest.approx((28 + 15 / 4) / 4, rel=1e-5)
    assert window_of(Scheme.parse("mxfp4"), 32, 2.0).doubling == pytest.approx((28 + 31 / 4) / 4, rel=1e-5)
    # Three powers of two: the floor rule has amax / scale in 4..8, the others in 2..4 and 8..16.
    assert 2 < window_of(Scheme.parse("mxfp4"), 32, 2.0).doubling < 16


FOUND = {
    "nvfp4:scale=search": (6.60, 6.81, 6.75), "nvfp4": (9.06, 8.62, 8.47),
    "nvfp4:scale=four_over_six": (7.55, 7.62, 7.50), "mxfp4_e2m1": (13.22, 16.05, 16.12),
    "mxfp4": (12.52, 15.36, 15.55), "mxfp4:scale=rceil": (13.38, 17.51, 17.81),
    "mxfp4:scale=ceil7.25": (12.46, 15.12, 15.25), "mxfp4:scale=search": (12.45, 15.08, 15.21),
    "int4:g128": (12.36, 23.12, 26.93),
}  # fmt: skip
"""Relative squared errors, times 1000, of 262,144 numbers: normal, Laplace, Student's t of 5."""


@pytest.mark.parametrize("scheme", FOUND)
def test_errors_of_known_distributions_are_those_that_were_measured_elsewhere(scheme: str) -> None:
    make = np.random.default_rng(11)
    samples = make.standard_normal(1 << 18), make.laplace(size=1 << 18), make.standard_t(5, 1 << 18)
    for sample, wanted in zip(samples, FOUND[scheme], strict=True):
        x = torch.tensor(sample, dtype=torch.float32).reshape(512, 512)
        error = (zp.quantize(x, scheme).dequantize() - x).double().square().sum() / x.double().square().sum()
        # A tail of Student's t moves the sum by a percent from sample to sample.
        assert float(error) * 1000 == pytest.approx(wanted, rel=0.025)


@pytest.mark.parametrize(
    ("scheme", "most"), [("int4:g128", 10.3), ("int4:g32", 7.72), ("int3:g128", 38.4), ("int2:g64", 143.5)]
)
def test_searched_scales_of_integers_are_as_good_as_a_sweep_of_clips(scheme: str, most: float) -> None:
    x = torch.tensor(np.random.default_rng(3).standard_normal((128, 512)), dtype=torch.float32)
    error = (zp.quantize(x, f"{scheme}:scale=search").dequantize() - x).square().sum() / x.square().sum()
    assert float(error) * 1000 < most


def best_real_error(block: np.ndarray, low: int, high: int) -> float:
    """Return the least squared error of integer codes under any real scale, an interval after the other."""
    ties = [abs(x) / (k + 0.5) for x in block if x for k in range(max(high, -low))]
    ends = np.array(sorted({*ties, 1e-9, 1e9}))
    best = float((block**2).sum())
    for scale in np.sqrt(ends[1:] * ends[:-1]):
        codes = np.clip(np.rint(block / scale), low, high)
        square = float((codes**2).sum())
        if square and (product := float((codes * block).sum())) > 0:
            best = min(best, float((block**2).sum()) - product**2 / square)
    return best


@pytest.mark.parametrize(
    ("scheme", "ends"), [("int4:g16", (-8, 7)), ("int3:g24", (-4, 3)), ("int8:g8", (-128, 127))]
)
def test_the_gap_to_the_best_real_scale_is_within_what_is_promised(
    scheme: str, ends: tuple[int, int]
) -> None:
    size = int(scheme.rsplit("g", 1)[1])
    x = blocks(size, count=3)
    q = zp.quantize(x, f"{scheme}:scale=search")
    errors = (q.dequantize().double() - x.double()).square().sum(1)
    for block, error in zip(x.double().numpy(), errors.tolist(), strict=True):
        squares = float((block**2).sum())
        assert error <= best_real_error(block, *ends) + (math.sqrt(2 ** (1 / 16)) - 1) ** 2 * squares + 1e-12


KERNELS = (
    "nvfp4:scale=search", "nvfp4:scale=search:dialect=modelopt", "mxfp4:scale=search",
    "mxfp8_e5m2:scale=search", "mxfp6_e2m3:scale=search", "mxint8:scale=search",
    "int4:g48:scale=search/e8m0", "nvfp4:scale=four_over_six",
    "int4:g16:scale=search/ue4m3:scale2=float32@tensor", "e3m0:g16:scale=search/e8m0",
    "int4:g32:scale=search", "int4:g32:asym:scale=search", "w4a16:scale=search",
    "e2m1:g32:scale=search2.4/e8m0", "nf4:g32:scale=search",
    "mxfp4:scale=ceil7.25", "float8_e4m3fn:block8x32:scale=search",
)  # fmt: skip


def hard(dtype: torch.dtype) -> torch.Tensor:
    """Return rows of blocks of all kinds and sizes, some of them near the smallest and largest numbers."""
    x = torch.cat([blocks(192, count=3), blocks(192, count=3, seed=5) * 1e-5])
    x[2] *= 1e-30
    x[5, :48] = 0.0
    x[6] = (x[6] * 8).round() / 8
    return x.to(dtype)


@pytest.mark.crossed
@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", KERNELS)
def test_kernels_find_what_the_reference_finds(scheme: str, dtype: torch.dtype) -> None:
    x, parsed = hard(dtype), Scheme.parse(scheme)
    data, stored = reference.quantize_dynamic(x, parsed)
    for threads in (1, 3):
        with thread_limit(threads):
            q = zp.quantize(x, scheme)
        assert torch.equal(q.data, data)
        for mine, theirs in zip(q.params.stored, stored, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    chosen = zp.choose_params(x, scheme)
    assert torch.equal(chosen.scales[0].view(torch.uint8), stored[0].view(torch.uint8))
    assert torch.equal(zp.quantize(x, chosen).data, data)


def test_parts_of_a_tensor_get_the_scales_that_they_have_in_the_whole() -> None:
    x = torch.randn(96, 4096, generator=torch.Generator().manual_seed(4)).bfloat16() ** 3
    whole = zp.quantize(x, "nvfp4:scale=search")
    extremes = float(x.min()), float(x.max())
    for rows in (slice(0, 7), slice(7, 96)):
        part = quantize_part(x[rows], whole.params.scheme, extremes)
        assert torch.equal(part.data, whole.data[rows])
        assert torch.equal(
            part.params.scales[0].view(torch.uint8), whole.params.scales[0][rows].view(torch.uint8)
        )


@pytest.mark.parametrize("scheme", [*KERNELS, "int4:tensor:scale=search"])
def test_errors_stay_within_the_bound_that_follows_from_scales_alone(scheme: str) -> None:
    for x in (hard(torch.float32), hard(torch.bfloat16), blocks(192, count=3, seed=9)):
        q = zp.quantize(x, scheme)
        bound = spread_blocks(
            q.params.error_bound(torch.float64), q.params.scheme.granularity, tuple(x.shape)
        )
        assert bool(((q.dequantize(torch.float64) - x.double()).abs() <= bound).all())
        assert bool(torch.isfinite(bound).all())


def test_the_start_wins_ties_and_else_the_smallest_scale() -> None:
    x = torch.tensor([[0.0] * 16, [1.0] * 16, [3.0, 1.5] * 8])
    for rule in ("search/e8m0", "search/ue4m3"):
        q = zp.quantize(x, f"e2m1:g16:scale={rule}")
        start = zp.quantize(x, q.params.scheme.start)
        exact = (start.dequantize() == x).all(1)
        assert torch.equal(
            q.params.scales[0].view(torch.uint8)[exact], start.params.scales[0].view(torch.uint8)[exact]
        )
    # Steps of 1 and of 2 hold these, and the start, 14 / 6, does not.
    x = torch.tensor([[8.0, 12.0, 6.0, 4.0] * 4]) * 2.0**-3
    assert float(zp.quantize(x, "e2m1:g16:scale=search/ue4m3").params.scales[0].float()) == 0.25


@pytest.mark.parametrize(
    ("power", "wanted"),
    [(1, abs), (2, lambda x: x * x), (2.5, lambda x: abs(x) ** 2.5), (3, lambda x: abs(x) ** 3)],
)
def test_powers_come_from_products_and_roots(power: float, wanted: Callable[[float], float]) -> None:
    x = torch.tensor([-2.25, 0.0, 1e-12, 7.0], dtype=torch.float64)
    assert powers(x, power).tolist() == pytest.approx([wanted(v) for v in x.tolist()], rel=1e-14)


def test_a_power_counts_in_steps_of_a_thousandth() -> None:
    x = torch.tensor([5.0], dtype=torch.float64)
    assert float(powers(x, 2.4)) == pytest.approx(5.0 ** (2458 / 1024), rel=1e-14)


def test_what_cannot_be_searched_says_so() -> None:
    with pytest.raises(NonFiniteError, match="contains nan at"):
        zp.quantize(torch.tensor([[1.0, float("nan")] * 16]), "mxfp4:scale=search")
    with pytest.raises(UnsupportedError, match="which a part does not have; quantize the whole tensor"):
        quantize_part(torch.ones(4, 64), Scheme.parse("int4:tensor:scale=search"), (-1.0, 1.0))


def test_training_and_ranges_take_the_start_and_tensors_the_search() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    params = zp.choose_params(x, "int4:g32:scale=search")
    assert torch.equal(zp.fake_quantize(x, params), zp.quantize(x, "int4:g32:scale=search").dequantize())
    ranged = zp.QuantizationParams.from_range(
        "int4:g32:scale=search", params.minimum, params.maximum, shape=(8, 64)
    )
    assert torch.equal(ranged.scales[0], zp.choose_params(x, "int4:g32").scales[0])


@pytest.mark.parametrize("scheme", ["int4:g32:scale=signed", "int3:g64:scale=signed/float16"])
def test_numbers_and_their_negatives_have_the_same_errors_under_signed_scales(scheme: str) -> None:
    x, mse = torch.randn(32, 128, generator=torch.Generator().manual_seed(3)), method_named("mse")
    found = [mse.quantize(sign * x, Scheme.parse(scheme)).q for sign in (1, -1)]
    off = [(q.dequantize() - sign * x).square() for q, sign in zip(found, (1, -1), strict=True)]
    blocks = found[0].scheme.granularity
    torch.testing.assert_close(sum_blocks(off[0], blocks), sum_blocks(off[1], blocks))


@pytest.mark.parametrize("element", ["int2", "int3", "int4", "int8", "e2m1", "nf4"])
def test_a_block_of_one_value_is_represented_exactly(element: str) -> None:
    x = torch.tensor([[-1.0], [1.0], [-3.3], [0.7]])
    for backend in ("reference", "cpu"):
        with zp.only_backend(backend):
            off = zp.quantize(x, f"{element}:g1:scale=search").dequantize() - x
            assert float((off / x).abs().max()) <= 2.0**-22  # what scales and products round


@pytest.mark.parametrize("scheme", ["uint4:g4:asym:scale=search/ue3m2", "uint4:g4:asym:scale=search/ue2m5"])
def test_scales_of_any_narrow_format_are_searched_with_zero_points(scheme: str) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    start = zp.quantize(x, scheme.replace("search/", ""))
    found = zp.quantize(x, scheme)
    found.params.validate()
    assert float((found.dequantize() - x).square().sum()) <= float((start.dequantize() - x).square().sum())


def test_the_bound_of_a_scale_of_zero_under_magnitudes_is_a_number() -> None:
    x = torch.cat([torch.full((1, 8), 1e-7), torch.ones(1, 8)]).half()
    q = zp.quantize(x, "int2:g2:scale=search1/ue2m5:scale2=bfloat16@tensor")
    assert bool((q.params.effective_scale() == 0).any())
    assert not bool(q.error_bound().isnan().any())
