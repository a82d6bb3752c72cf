"""LearnedScale against the formulas of LSQ and LSQ+ in float64, against torch's learnable fake quantization,
and against finite differences of a smooth stand-in.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from tests.tensors import normal
from torch.func import functional_call

import zeropoint as zp
from zeropoint import QuantizationParams, Scheme
from zeropoint.training import LearnedScale

BLOCKS = {"tensor": (4, 18), "channel": (1, 18), "channel1": (4, 1), "g5": (1, 5), "block3x4": (3, 4)}
SHAPE = (4, 18)


def by_hand(
    x: np.ndarray, dy: np.ndarray, factors: tuple[float, float], ends: tuple[int, int]
) -> tuple[np.ndarray, float, float]:
    """Return dx, ds and d beta of one block, from the equations of the papers, an element at a time."""
    (s, beta), (low, high) = factors, ends
    dx, ds, dbeta = np.zeros_like(x), 0.0, 0.0
    for place in np.ndindex(x.shape):
        v = (x[place] - beta) / s
        code = np.rint(v)
        if low <= code <= high:
            dx[place] = dy[place]
            ds += dy[place] * (code - v)
        else:
            ds += dy[place] * (low if code < low else high)
            dbeta += dy[place]
    return dx, ds, dbeta


@pytest.mark.crossed
@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("element", ["int2", "int4", "int8:{}:narrow", "uint3"])
def test_gradients_are_those_of_lsq_in_every_block(element: str, granularity: str) -> None:
    """In float64: the last blocks are short, and each has a sum of its own."""
    text = element.format(granularity) if "{}" in element else f"{element}:{granularity}"
    x, dy = normal(*SHAPE, dtype=torch.float64), normal(*SHAPE, dtype=torch.float64, seed=1)
    start = (x / 2).clamp(min=0) if text.startswith("u") else x / 2
    quantizer = LearnedScale(zp.choose_params(start, text + ":scale=float64"))
    leaf = x.clone().requires_grad_()
    quantizer(leaf).backward(dy)
    rows, columns = BLOCKS[granularity]
    scheme = quantizer.scheme
    grid = quantizer.scale.shape
    count = x.numel() // quantizer.scale.numel()
    for i, j in itertools.product(range(grid[0]), range(grid[1])):
        pick = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        s = quantizer.scale[i, j].item()
        dx, ds, _ = by_hand(x.numpy()[pick], dy.numpy()[pick], (s, 0.0), (scheme.qmin, scheme.qmax))
        assert np.array_equal(leaf.grad.numpy()[pick], dx)
        wanted = ds / math.sqrt(count * scheme.qmax)
        assert math.isclose(quantizer.scale.grad[i, j].item(), wanted, rel_tol=1e-11, abs_tol=1e-13)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_gradients_of_a_real_offset_are_those_of_lsq_plus(granularity: str) -> None:
    x, dy = normal(*SHAPE, dtype=torch.float64) + 0.4, normal(*SHAPE, dtype=torch.float64, seed=1)
    params = zp.choose_params(x / 2, f"uint3:{granularity}:asym=real:scale=float64")
    quantizer = LearnedScale(params)
    assert torch.allclose(quantizer.offset, -params.zero_point * params.scales[0], rtol=1e-15, atol=0)
    assert quantizer.zero_point is None
    leaf = x.clone().requires_grad_()
    y = quantizer(leaf)
    y.backward(dy)
    assert torch.equal(y, zp.quantize(x, quantizer.params).dequantize())
    rows = BLOCKS[granularity][0]
    for i in range(quantizer.scale.shape[0]):
        pick = np.s_[i * rows : (i + 1) * rows]
        factors = quantizer.scale[i, 0].item(), quantizer.offset[i, 0].item()
        dx, ds, dbeta = by_hand(x.numpy()[pick], dy.numpy()[pick], factors, (0, 7))
        root = math.sqrt(rows * 18 * 7)
        assert np.array_equal(leaf.grad.numpy()[pick], dx)
        assert math.isclose(quantizer.scale.grad[i, 0].item(), ds / root, rel_tol=1e-11)
        assert math.isclose(quantizer.offset.grad[i, 0].item(), dbeta / root, rel_tol=1e-11)
        assert dbeta != 0.0


def learnable_by_torch(
    x: torch.Tensor, dy: torch.Tensor, quantizer: LearnedScale, axis: int | None
) -> list[torch.Tensor]:
    """Return result and gradients of x, scale and zero point from torch's own learnable fake quantization."""
    scheme = quantizer.scheme
    leaf = x.clone().requires_grad_()
    scale = quantizer.scale.detach().flatten().clone().requires_grad_()
    zeros = quantizer.zero_point.detach().flatten().clone().requires_grad_()
    ends = (scheme.qmin, scheme.qmax, quantizer.factor)
    if axis is None:
        y = torch._fake_quantize_learnable_per_tensor_affine(leaf, scale, zeros, *ends)
    else:
        y = torch._fake_quantize_learnable_per_channel_affine(leaf, scale, zeros, axis, *ends)
    y.backward(dy)
    return [y.detach(), leaf.grad, scale.grad, zeros.grad]


def learnable_by_us(x: torch.Tensor, dy: torch.Tensor, quantizer: LearnedScale) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = quantizer(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, quantizer.scale.grad.flatten(), quantizer.zero_point.grad.flatten()]


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("element", ["uint4", "int8"])
def test_everything_is_torchs_bit_for_bit_where_arithmetic_is_exact(element: str, axis: int | None) -> None:
    """All inputs are small multiples of powers of two, so that no order of operations rounds.

    There are no ties: at a tie torch's gradient rounds with the zero point inside, its forward without.
    """
    x = (normal(24, 32) * 40).round() / 16 + 2.0**-10
    dy = (normal(24, 32, seed=1) * 8).round() / 8
    granularity = "tensor" if axis is None else f"channel{axis}"
    scheme = Scheme.parse(f"{element}:{granularity}:asym:dialect=torch")
    grid = scheme.granularity.grid((24, 32))
    params = QuantizationParams(
        scheme=scheme,
        shape=(24, 32),
        scales=(
            torch.exp2(torch.arange(math.prod(grid)) % 3 - (2.0 if element == "uint4" else 6.0)).reshape(
                grid
            ),
        ),
        zero_point=(torch.arange(math.prod(grid), dtype=torch.int32) % 5 + 3).reshape(grid),
    )
    quantizer = LearnedScale(params)
    quantizer.factor = 0.25
    ours, theirs = learnable_by_us(x, dy, quantizer), learnable_by_torch(x, dy, quantizer, axis)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert all(int(gradient.count_nonzero()) > 0 for gradient in ours[1:])


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_gradients_are_torchs_up_to_the_order_of_summation(axis: int | None) -> None:
    x, dy = normal(64, 48), normal(64, 48, seed=1)
    granularity = "tensor" if axis is None else f"channel{axis}"
    quantizer = LearnedScale(zp.choose_params(x / 2, f"uint4:{granularity}:asym:dialect=torch"))
    ours, theirs = learnable_by_us(x, dy, quantizer), learnable_by_torch(x, dy, quantizer, axis)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    # float32 sums of up to 3072 terms of size about 1 times the factor, each within 2**-22.
    bound = 3072 * quantizer.factor * 2.0**-22
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        assert (mine - other).abs().max().item() <= bound
        assert other.abs().max().item() > 100 * bound


@pytest.mark.parametrize(
    "text", ["int4:channel", "uint3:g5:asym=real", "uint3:tensor:asym", "int3:block3x4:round=floor"]
)
def test_gradients_are_the_differences_of_a_stand_in_whose_roundings_are_frozen(text: str) -> None:
    """In float64, away from kinks.

    Straight through means: with r = Q - v frozen, y = x + s r inside the codes, s Q + beta outside.
    """
    x = normal(*SHAPE, dtype=torch.float64)
    quantizer = LearnedScale(zp.choose_params(x / 2, text + ":scale=float64"))
    quantizer.factor = 1.0
    learned = dict(quantizer.named_parameters())
    with torch.no_grad():
        y0 = quantizer(x)
        inside = quantizer.backward(torch.ones_like(x), x) != 0
        spread = {name: spread_like(value, quantizer.scheme) for name, value in learned.items()}
        residue = (y0 - x) / spread["scale"]
        z0 = spread.get("zero_point", torch.zeros(()))
        outer = (y0 - spread.get("offset", torch.zeros(()))) / spread["scale"] + z0

    def stand_in(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        now = {n: spread_like(v, quantizer.scheme) for n, v in zip(learned, values, strict=True)}
        clipped = (outer - now.get("zero_point", 0.0)) * now["scale"] + now.get("offset", 0.0)
        smooth = torch.where(inside, x + now["scale"] * residue, clipped)
        ours = functional_call(quantizer, dict(zip(learned, values, strict=True)), (x,))
        return smooth.detach() + (ours - ours.detach())

    leaves = [
        x.clone().requires_grad_(),
        *(value.detach().clone().requires_grad_() for value in learned.values()),
    ]
    assert 0 < int(inside.sum()) < x.numel()
    assert torch.autograd.gradcheck(stand_in, leaves, eps=1e-7, atol=1e-6)


def spread_like(values: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return one value an element, by repetition along each axis."""
    for axis, extent in enumerate(scheme.granularity.block_shape(SHAPE)):
        if values.shape[axis] > 1:
            values = values.repeat_interleave(extent, axis).narrow(axis, 0, SHAPE[axis])
    return values.expand(SHAPE)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "text", ["int4:channel", "uint4:g8:asym", "int2:tensor", "float8_e4m3fn:channel", "nf4:g8"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_forward_is_the_deployed_round_trip_and_gradients_keep_dtypes(
    text: str, dtype: torch.dtype
) -> None:
    x = normal(6, 40, dtype=dtype)
    quantizer = LearnedScale.from_tensor(x, text)
    with torch.no_grad():
        quantizer.scale.mul_(0.7)
    leaf = x.clone().requires_grad_()
    y = quantizer(leaf)
    y.float().square().sum().backward()
    assert torch.equal(y, zp.quantize(x, quantizer.params).dequantize())
    assert (y.dtype, leaf.grad.dtype) == (dtype, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert quantizer.scale.dtype == quantizer.scale.grad.dtype == wide
    quantizer.params.validate()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_tensors_are_summed_in_float32(dtype: torch.dtype) -> None:
    x, dy = normal(64, 64, dtype=dtype), normal(64, 64, dtype=dtype, seed=1)
    narrow, wide = (LearnedScale(QuantizationParams.new(0.1, 0, "int4:tensor")) for _ in range(2))
    narrow(x).backward(dy)
    wide(x.float()).backward(dy.float())
    assert torch.equal(narrow.scale.grad, wide.scale.grad)
    assert narrow.scale.grad.item() != 0.0


@pytest.mark.parametrize(
    "text", ["int4:channel:scale=bfloat16", "int4:channel:scale=ue4m3", "int4:channel:scale=input"]
)
def test_a_scale_of_a_narrow_format_is_used_and_deployed_rounded(text: str) -> None:
    x = normal(4, 32, dtype=torch.bfloat16)
    quantizer = LearnedScale.from_tensor(x, text)
    with torch.no_grad():
        quantizer.scale.mul_(1.01)
    quantizer.params.validate()
    assert quantizer.params.scheme == Scheme.parse(text)
    used = quantizer.params.effective_scale()
    assert not torch.equal(used, quantizer.scale.detach())
    assert torch.allclose(used, quantizer.scale.detach(), rtol=2.0**-4)
    assert torch.equal(quantizer(x), zp.quantize(x, quantizer.params).dequantize())
    quantizer(x).float().sum().backward()
    assert int(quantizer.scale.grad.count_nonzero()) == 4


def test_the_first_scale_is_twice_the_mean_magnitude_over_the_root_of_the_largest_code() -> None:
    x = torch.tensor([[1.0, -3.0, 2.0], [0.0, 0.0, 0.0]])
    quantizer = LearnedScale.from_tensor(x, "int4:channel")
    assert math.isclose(quantizer.scale[0, 0].item(), 4.0 / math.sqrt(7), rel_tol=2.0**-22)
    assert quantizer.scale[1, 0].item() == 1.0
    assert quantizer.factor == 1 / math.sqrt(3 * 7)
    assert LearnedScale.from_tensor(x, "int4:channel", count=2).factor == 1 / math.sqrt(14)


def test_nan_and_infinity_have_no_gradient_and_leave_that_of_the_scale_finite() -> None:
    quantizer = LearnedScale(QuantizationParams.new(1.0, 0, "int4"), count=1)
    quantizer.factor = 1.0
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.25], requires_grad=True)
    quantizer(x).backward(torch.ones(4))
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert quantizer.scale.grad.tolist() == [-8 + 7 - 8 - 0.25]


@pytest.mark.crossed
@pytest.mark.parametrize("bad", [0.0, -3.0, 1e-45, -math.inf])
@pytest.mark.parametrize(
    "text",
    [
        "int4:tensor",
        "int4:tensor:dialect=torch",
        "int4:tensor:scale=ue4m3",
        "uint4:tensor:asym",
        "uint4:tensor:asym=real",
    ],
)
def test_a_scale_driven_to_zero_or_below_acts_as_the_smallest_and_is_reported(text: str, bad: float) -> None:
    quantizer = LearnedScale(QuantizationParams.from_range(text, -20.0, 1.0), count=1)
    assert quantizer.guarded_count == 0
    with torch.no_grad():
        quantizer.scale.fill_(bad)
    x = torch.tensor([1.0, -2.0, 0.0, 1e30], requires_grad=True)
    y = quantizer(x)
    y.square().sum().backward()
    assert quantizer.guarded_count == 1
    assert torch.isfinite(y).all()
    quantizer.params.validate()
    assert quantizer.params.effective_scale().item() == pytest.approx(quantizer.least_scale, rel=0)
    for parameter in quantizer.parameters():
        # Sums of dy times codes of at most 16; dy is at most 2 * 20.
        assert parameter.grad.abs().max().item() < 4 * 40 * 16


def test_the_optimizer_brings_a_lost_scale_back() -> None:
    quantizer = LearnedScale(QuantizationParams.new(0.1, 0, "int4"), count=64)
    with torch.no_grad():
        quantizer.scale.fill_(-0.5)
    x = normal(64, seed=1)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (quantizer(x) - x).square().mean().backward()
        optimizer.step()
    assert quantizer.guarded_count == 0
    assert quantizer.quantization_noise(x) < 0.02


def test_learning_lowers_the_error_below_that_of_the_largest_magnitude() -> None:
    x = normal(4096)
    quantizer = LearnedScale(zp.choose_params(x, "int3"))
    start = quantizer.quantization_noise(x)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        (quantizer(x) - x).square().mean().backward()
        optimizer.step()
    assert quantizer.quantization_noise(x) < 0.6 * start


@pytest.mark.parametrize("text", ["nvfp4", "mxfp4", "float8_e4m3fn:cast"])
def test_a_scheme_without_one_linear_scale_is_refused(text: str) -> None:
    with pytest.raises(
        zp.SchemeError, match=r"must have one scale level with a linear rule to learn its scales"
    ):
        LearnedScale(zp.choose_params(normal(4, 32), text))


def test_other_bad_arguments_are_refused() -> None:
    params = QuantizationParams.int4_symmetric()
    with pytest.raises(
        zp.RangeError, match=r"count \(=0\) must be at least 1: the elements that share a scale"
    ):
        LearnedScale(params, count=0)
    with pytest.raises(zp.RangeError, match=r"scale 1 \(=-1.0\) of block"):
        LearnedScale(QuantizationParams(scheme=params.scheme, shape=(1,), scales=(torch.tensor([-1.0]),)))
    dialect = LearnedScale(QuantizationParams.new(1.0, 0, "int4:tensor:dialect=compressed-tensors"))
    with pytest.raises(
        zp.DtypeError, match=r"x \(dtype torch.bfloat16\) must be float32 or float64 to learn in"
    ):
        dialect(torch.ones(3, dtype=torch.bfloat16))
    channels = LearnedScale.from_tensor(normal(4, 8), "int4:channel")
    with pytest.raises(
        zp.ShapeError, match=r"x \(shape \(5, 8\)\) must have a grid of blocks like .*\(4, 1\)"
    ):
        channels(normal(5, 8))


def test_one_scale_serves_any_shape() -> None:
    quantizer = LearnedScale(QuantizationParams.new(0.5, 0, "int4"))
    for shape in [(), (3,), (2, 3, 4), (0, 3)]:
        x = normal(*shape)
        quantizer(x).sum().backward() if x.numel() else None
        assert quantizer(x).shape == shape
    assert quantizer.scale.grad.shape == (1,)
