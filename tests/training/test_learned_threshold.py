"""LearnedThreshold against the equations of TQT in float64, and its starts against numpy."""

import math

import numpy as np
import pytest
import torch
from tests.tensors import normal
from torch.func import functional_call

import zeropoint as zp
from zeropoint import Scheme
from zeropoint.recipes import TQTThresholdInitMeth
from zeropoint.training import LearnedScale, LearnedThreshold, ThresholdRule
from zeropoint.training.thresholds import threshold


def by_hand(
    x: np.ndarray, dy: np.ndarray, log2_t: float, bits: int, signed: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return y, dx and d log2 t of one block from the paper's equations, an element at a time."""
    scale = 2.0 ** math.ceil(log2_t) / 2.0 ** (bits - 1 if signed else bits)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    y, dx, total = np.zeros_like(x), np.zeros_like(x), 0.0
    for place in np.ndindex(x.shape):
        v = x[place] / scale
        code = np.rint(v)
        y[place] = min(max(code, low), high) * scale
        inside = low <= code <= high
        dx[place] = dy[place] if inside else 0.0
        local = code - v if inside else (low if code < low else high)
        total += dy[place] * scale * math.log(2.0) * local
    return y, dx, total


@pytest.mark.crossed
@pytest.mark.parametrize("log2_t", [-3.0, -0.4, 0.0, 0.01, 1.7])
@pytest.mark.parametrize("element", ["int4", "int8", "uint4", "int2"])
@pytest.mark.parametrize("option", [":scale=float64", ":scale=ceil", ""])
def test_forward_and_gradients_are_those_of_the_paper(element: str, log2_t: float, option: str) -> None:
    x, dy = normal(40, 25, dtype=torch.float64), normal(40, 25, dtype=torch.float64, seed=1)
    quantizer = LearnedThreshold(f"{element}:tensor{option}", 1.0, dtype=torch.float64)
    with torch.no_grad():
        quantizer.log2_threshold.fill_(log2_t)
    leaf = x.clone().requires_grad_()
    result = quantizer(leaf)
    result.backward(dy)
    scheme = quantizer.scheme
    y, dx, total = by_hand(x.numpy(), dy.numpy(), log2_t, scheme.bits, scheme.qmin < 0)
    assert np.array_equal(result.detach().numpy(), y)
    assert np.array_equal(leaf.grad.numpy(), dx)
    assert math.isclose(quantizer.log2_threshold.grad.item(), total, rel_tol=1e-11)
    assert total != 0.0


@pytest.mark.parametrize("text", ["int4:channel", "int3:g5", "uint4:channel1"])
def test_every_block_has_a_threshold_and_a_gradient_of_its_own(text: str) -> None:
    x, dy = normal(4, 12, dtype=torch.float64), normal(4, 12, dtype=torch.float64, seed=1)
    whole = LearnedThreshold.from_tensor(x, text + ":scale=float64")
    with torch.no_grad():
        whole.log2_threshold.sub_(1)
    whole(x).backward(dy)
    scheme = whole.scheme
    rows, columns = scheme.granularity.block_shape((4, 12))
    for i, j in np.ndindex(*whole.log2_threshold.shape):
        pick = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        start = whole.log2_threshold[i, j].item()
        *_, total = by_hand(x.numpy()[pick], dy.numpy()[pick], start, scheme.bits, scheme.qmin < 0)
        assert math.isclose(whole.log2_threshold.grad[i, j].item(), total, rel_tol=1e-11, abs_tol=1e-14)


def test_the_gradient_is_the_difference_of_a_stand_in_whose_roundings_are_frozen() -> None:
    """Gradcheck in float64: with a smooth scale 2 ** log2 t, and the residues of rounding held fixed."""
    x = normal(30, dtype=torch.float64)
    quantizer = LearnedThreshold("int3:tensor:scale=float64", 1.0, dtype=torch.float64)
    base = torch.zeros(1, dtype=torch.float64)
    y0 = functional_call(quantizer, {"log2_threshold": base}, (x,)).detach()
    inside = quantizer.backward(torch.ones_like(x), x) != 0

    def stand_in(x: torch.Tensor, log2_t: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(log2_t) / 4
        frozen = torch.where(inside, x + scale * (y0 - x_fixed) * 4, scale * y0 * 4)
        ours = functional_call(quantizer, {"log2_threshold": log2_t}, (x,))
        return frozen.detach() + (ours - ours.detach())

    x_fixed = x.clone()
    # The difference is one-sided in the ceiling, so that log2 t = 0 is moved to just below it.
    leaves = [x.requires_grad_(), (base - 1e-3).requires_grad_()]
    y0 = functional_call(quantizer, {"log2_threshold": leaves[1].detach()}, (x.detach(),))
    assert torch.equal(y0, functional_call(quantizer, {"log2_threshold": base}, (x.detach(),)))
    with torch.no_grad():
        shift = torch.exp2(leaves[1])
    assert 0 < int(inside.sum()) < 30
    # The stand-in's scale is 2 ** -0.001 of the power of two, and so are its derivatives.
    assert torch.autograd.gradcheck(stand_in, leaves, eps=1e-7, rtol=2 * (1 - shift.item()), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_threshold_has_the_power_of_two_at_or_above_it(dtype: torch.dtype) -> None:
    """Exponents come from the bits: 8 has exponent 3, its neighbor above 4, at every magnitude."""
    for exponent in range(-100, 100, 7):
        for value, wanted in [
            (2.0**exponent, exponent),
            (math.nextafter(2.0**exponent, math.inf), exponent + 1),
            (math.nextafter(2.0**exponent, 0.0), exponent),
            (1.5 * 2.0**exponent, exponent + 1),
        ]:
            quantizer = LearnedThreshold("int4", torch.tensor(value, dtype=torch.float64), dtype=dtype)
            assert math.ceil(quantizer.log2_threshold.item()) == wanted
            assert quantizer.params.effective_scale().item() == 2.0 ** (wanted - 3)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "text", ["int4:channel", "int8:tensor:scale=ceil", "uint4:g8", "int4:tensor:scale=bfloat16"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_forward_is_the_deployed_round_trip(text: str, dtype: torch.dtype) -> None:
    x = normal(6, 40, dtype=dtype)
    quantizer = LearnedThreshold.from_tensor(x, text, ThresholdRule.THREE_SD)
    leaf = x.clone().requires_grad_()
    y = quantizer(leaf)
    y.float().square().sum().backward()
    assert torch.equal(y, zp.quantize(x, quantizer.params).dequantize())
    assert y.dtype == leaf.grad.dtype == dtype
    assert quantizer.log2_threshold.grad.dtype == torch.float32
    quantizer.params.validate()
    mantissa, _ = torch.frexp(quantizer.params.effective_scale())
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))


def kl_j_by_numpy(x: np.ndarray, levels: int) -> float:
    """Return the threshold of Algorithm 1 of arXiv:1805.07941, from numpy's histogram and interpolation."""
    counts, edges = np.histogram(np.abs(x), "sqrt", range=(0.0, np.abs(x).max()))
    cdf = np.cumsum(counts / counts.sum())
    best, found = math.inf, edges[-1]
    for i in range(levels + 1, len(edges)):
        p = cdf.copy()
        p[i - 1 :] = 1
        fine, coarse = np.linspace(0, 1, i), np.linspace(0, 1, levels)
        q = p.copy()
        q[:i] = np.interp(fine, coarse, np.interp(coarse, fine, p[:i]))
        both = (cdf > 0) & (q > 0)
        distance = np.sum((cdf[both] - q[both]) * np.log2(cdf[both] / q[both]))
        if distance < best - 1e-15:
            best, found = distance, (i + 0.5) * (edges[1] - edges[0])
    return found


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("scheme", ["int3", "int4", "uint4"])
def test_the_kl_j_search_finds_what_numpy_finds(scheme: str, power: int) -> None:
    x = normal(70, 70, dtype=torch.float64) ** power
    if scheme.startswith("u"):
        x = x.abs()
    found = threshold(x, Scheme.parse(scheme), ThresholdRule.KL_J)
    levels = {"int3": 4, "int4": 8, "uint4": 16}[scheme]
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(kl_j_by_numpy(x.numpy().reshape(-1), levels), rel=1e-12)
    assert 0 < found.item() <= x.abs().max().item() * 1.05


def test_the_kl_j_search_clips_long_tails() -> None:
    x = normal(100, 100, dtype=torch.float64) ** 5
    found = threshold(x, Scheme.parse("int4"), ThresholdRule.KL_J).item()
    assert found < 0.7 * x.abs().max().item()


def test_too_few_bins_for_a_search_keep_the_largest_magnitude() -> None:
    assert threshold(torch.tensor([1.0, -3.0]), Scheme.parse("int8"), ThresholdRule.KL_J).item() == 3.0


def test_three_standard_deviations_are_those_of_numpy_in_every_block() -> None:
    x = normal(4, 33, dtype=torch.float64) + torch.arange(4)[:, None]
    found = threshold(x, Scheme.parse("int8:channel"), ThresholdRule.THREE_SD)
    wanted = np.abs(x.numpy().mean(1)) + 3 * x.numpy().std(1)
    assert np.allclose(found.numpy()[:, 0], wanted, rtol=1e-13)
    greatest = threshold(x, Scheme.parse("int8:channel"), ThresholdRule.MAX)
    assert np.array_equal(greatest.numpy()[:, 0], np.abs(x.numpy()).max(1))


def test_a_block_of_zeros_starts_at_scale_one() -> None:
    for rule in (ThresholdRule.MAX, ThresholdRule.THREE_SD):
        quantizer = LearnedThreshold.from_tensor(torch.zeros(2, 8), "int4:channel", rule)
        assert quantizer.params.effective_scale().flatten().tolist() == [1.0, 1.0]


def test_training_finds_the_best_power_of_two() -> None:
    x = normal(4096)
    noises = [LearnedThreshold("int4", 2.0**e).quantization_noise(x).item() for e in range(-3, 6)]
    for start in (2.0**-3, 2.0**5):
        quantizer = LearnedThreshold("int4", start)
        optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.05)
        for _ in range(200):
            optimizer.zero_grad()
            (quantizer(x) - x).square().mean().backward()
            optimizer.step()
        assert quantizer.quantization_noise(x).item() <= sorted(noises)[1]


@pytest.mark.crossed
@pytest.mark.parametrize("option", ["", ":scale=ceil", ":scale=float16"])
@pytest.mark.parametrize("far", [1e4, -1e4, math.inf, -math.inf])
def test_a_threshold_driven_out_of_range_acts_as_the_end_of_its_format(far: float, option: str) -> None:
    """Whatever the optimizer does, the scale is a positive power of two."""
    quantizer = LearnedThreshold(f"int4:tensor{option}", 1.0)
    with torch.no_grad():
        quantizer.log2_threshold.fill_(far)
    x = normal(64).requires_grad_()
    y = quantizer(x)
    y.sum().backward()
    quantizer.params.validate()
    ends = (2.0**-14, 2.0**15) if "16" in option else (2.0**-126, 2.0**126)
    assert quantizer.params.effective_scale().item() == ends[far > 0]
    assert torch.isfinite(y).all()
    assert torch.isfinite(quantizer.log2_threshold.grad).all()


def test_a_threshold_that_became_nan_shows_in_the_result() -> None:
    quantizer = LearnedThreshold("int4", 1.0)
    with torch.no_grad():
        quantizer.log2_threshold.fill_(math.nan)
    assert torch.isnan(quantizer(torch.ones(3))).all()


def test_nan_and_infinity_have_no_gradient_and_leave_that_of_the_threshold_finite() -> None:
    quantizer = LearnedThreshold("int4", 8.0)
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.25], requires_grad=True)
    quantizer(x).backward(torch.ones(4))
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert math.isclose(
        quantizer.log2_threshold.grad.item(), (-8 + 7 - 8 - 0.25) * math.log(2.0), rel_tol=1e-6
    )


@pytest.mark.parametrize("text", ["uint4:tensor:asym", "mxfp4", "nf4:g64", "nvfp4", "int8:tensor:asym=real"])
def test_other_schemes_are_refused(text: str) -> None:
    with pytest.raises(
        zp.SchemeError, match=r"must be of symmetric integers with one scale level to learn a thr"
    ):
        LearnedThreshold(text, 1.0)


def test_bad_thresholds_are_refused() -> None:
    with pytest.raises(zp.RangeError, match=r"thresholds \(least -2.0\) must not be negative"):
        LearnedThreshold("int4", -2.0)
    with pytest.raises(zp.NonFiniteError, match="thresholds must be finite"):
        LearnedThreshold("int4", math.nan)
    with pytest.raises(zp.RangeError, match=r"x \(shape \(0,\)\) must hold elements to find a threshold"):
        LearnedThreshold.from_tensor(torch.empty(0), "int4")
    with pytest.raises(zp.SchemeError, match="must have one block for the KL-J search"):
        LearnedThreshold.from_tensor(torch.ones(4, 4), "int4:channel", ThresholdRule.KL_J)
    with pytest.raises(zp.ShapeError, match="must have a grid of blocks like"):
        LearnedThreshold("int4:channel", torch.ones(3), shape=(4, 4))
    dialect = LearnedThreshold("int4:tensor:dialect=compressed-tensors", 1.0)
    with pytest.raises(
        zp.DtypeError, match="must be float32 or float64 to learn in dialect compressed-tensors"
    ):
        dialect(torch.ones(3, dtype=torch.float16))


@pytest.mark.parametrize("rule", ["_3SD", "3sd", "max", None, 7, ThresholdRule])
def test_a_rule_is_a_member_of_its_enumeration(rule: object) -> None:
    with pytest.raises(
        zp.SchemeError, match=r"rule \(=.*\) must be a ThresholdRule; ThresholdRule\('_3SD'\)"
    ):
        LearnedThreshold.from_tensor(torch.ones(4), "int8", rule)  # type: ignore[arg-type]


def test_quarks_names_of_rules_are_read() -> None:
    assert ThresholdRule("_3SD") is ThresholdRule(TQTThresholdInitMeth._3SD) is ThresholdRule.THREE_SD
    assert ThresholdRule("_LL_J") is ThresholdRule("_KL_J") is ThresholdRule.KL_J
    with pytest.raises(ValueError, match="'_4SD' is not a valid ThresholdRule"):
        ThresholdRule("_4SD")


def test_no_advice_leads_in_a_circle() -> None:
    with pytest.raises(
        zp.SchemeError, match="powers of two of symmetric integers, and FakeQuantize"
    ) as first:
        LearnedScale(zp.choose_params(torch.ones(32), "mxfp4"))
    with pytest.raises(zp.SchemeError, match="linear scales of any element, FakeQuantize takes every"):
        LearnedThreshold("mxfp4", 1.0)
    assert "learns nothing" in str(first.value)
