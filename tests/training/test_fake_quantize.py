"""FakeQuantize: its parts, its forward, which is what is deployed, and its gradient, which is torch's."""

import math
from dataclasses import replace

import pytest
import torch
from tests.tensors import normal

import zeropoint as zp
from zeropoint import QuantizationParams, Scheme
from zeropoint.schemes import PRESETS
from zeropoint.training import FakeQuantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SCHEMES = list(
    dict.fromkeys(
        [
            *PRESETS,
            *(preset.input for preset in PRESETS.values() if preset.input is not None),
            "uint8:tensor:asym",
            "uint4:g32:asym=real",
            "float8_e4m3fn:cast",
            "table4:g32:scale=float16",
            "int4:g32:round=stochastic(5)",
            "int8:channel1:dialect=torch",
        ]
    )
)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_forward_is_the_deployed_round_trip_bit_for_bit(scheme: str, dtype: torch.dtype) -> None:
    """Every preset and dtype, on data that the parameters were not made from too."""
    x = normal(*((130, 150) if "128x128" in scheme else (6, 150)), dtype=dtype)
    quantizer = FakeQuantize.from_tensor(x, scheme)
    for data in (x, x * 1.5):
        deployed = zp.quantize(data, quantizer.params).dequantize()
        leaf = data.clone().requires_grad_()
        assert torch.equal(quantizer(leaf), deployed)
        assert torch.equal(quantizer(data), deployed)
        assert quantizer(data).dtype == dtype
    assert not torch.equal(quantizer(x), x)


def test_one_symmetric_bit_has_two_codes_of_either_sign() -> None:
    assert FakeQuantize.from_bits(1).quant_range() == (-1, 1)


@pytest.mark.parametrize(
    "scheme", ["int4:g8", "uint4:g8:asym", "mxfp4", "nvfp4", "nf4:g8", "mx9", "e4m3:cast"]
)
def test_numbers_far_outside_become_the_ends_of_the_float_range(scheme: str) -> None:
    x = normal(4, 32)
    quantizer = FakeQuantize.from_tensor(x, scheme)
    low, high = quantizer.float_range()
    shape = quantizer.params.scheme.granularity.grid((4, 32))
    assert low.expand(shape).shape == torch.Size(shape)
    ends = [quantizer(torch.full_like(x, end)) for end in (-1e30, 1e30)]
    width = 32 // shape[-1]
    for end, bound in zip(ends, (low, high), strict=True):
        assert torch.equal(end[:, ::width], bound.expand(4, shape[-1]) if bound.ndim else end[:, ::width])
    if low.ndim == 0:
        assert (float(low), float(high)) == (float(ends[0][0, 0]), float(ends[1][0, 0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, r"bits \(=0\) must be an integer in 1..16; or pass a scheme"),
        ({"bits": 17}, r"bits \(=17\) must be an integer in 1..16"),
        ({"bits": True}, r"bits \(=True\) must be an integer in 1..16"),
        ({"bits": 8, "scale": 0.0}, r"scale 1 \(=0.0\) of block \(0,\) must be finite and at least"),
        ({"bits": 8, "scale": -1.0}, r"scale 1 \(=-1.0\)"),
        ({"bits": 8, "scale": math.nan}, r"scale 1 \(=nan\)"),
        ({"bits": 8, "zero_point": 3}, r"zero_point \(=3\) must be 0 for symmetric codes; pass symmetric=F"),
        (
            {"bits": 4, "symmetric": False, "zero_point": 16},
            r"zero_point \(=16\) of block .* must lie in 0..15",
        ),
    ],
)
def test_bad_numbers_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(zp.RangeError, match=message):
        FakeQuantize.from_bits(**arguments)


def test_new_parameters_are_used_at_once_and_written_in_place() -> None:
    quantizer = FakeQuantize.from_bits(8, symmetric=False, scale=0.5, zero_point=1)
    buffer = quantizer.scale1
    quantizer.update_params(0.25, 7)
    assert quantizer.scale1 is buffer
    assert quantizer.params == QuantizationParams.new(0.25, 7, "uint8:tensor:asym")
    assert quantizer(torch.tensor([0.26])).tolist() == [0.25]
    assert quantizer(torch.tensor([-9.0])).tolist() == [-1.75]


def test_parameters_of_every_channel_and_of_several_levels_can_be_replaced() -> None:
    x = normal(4, 32)
    channels = FakeQuantize.from_tensor(x, "int8:channel")
    channels.update_params(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert channels.scale1.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    zeros = FakeQuantize.from_tensor(x, "uint4:channel:asym")
    zeros.update_params(torch.ones(4), torch.tensor([1, 2, 3, 4]))
    assert zeros.params.zero_point.flatten().tolist() == [1, 2, 3, 4]
    narrow = FakeQuantize.from_tensor(x, "int4:channel:scale=ue5m3")
    narrow.update_params(0.26)
    assert narrow.params.effective_scale().flatten().tolist() == [0.25] * 4
    levels = FakeQuantize.from_tensor(x, "nvfp4")
    levels.update_params(zp.choose_params(3 * x, "nvfp4"))
    assert torch.equal(levels(3 * x), zp.fake_quantize(3 * x, "nvfp4"))


def test_a_refused_update_changes_nothing() -> None:
    quantizer = FakeQuantize.from_bits(8, symmetric=False, scale=0.5, zero_point=1)
    before = quantizer.params.tensors()
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(zp.RangeError, match=r"zero_point \(=256\) of block"):
        quantizer.update_params(0.25, 256)
    for scale in (-0.25, 0.0, math.nan, math.inf):
        message = rf"scale \(={scale}\) of block \(0,\) must be positive and finite"
        with pytest.raises(zp.RangeError, match=message):
            quantizer.update_params(scale, 3)
    with pytest.raises(
        zp.RangeError, match=r"zero_point \(=2.5\) of block \(0,\) must be an integer for uint8"
    ):
        quantizer.update_params(0.25, torch.tensor(2.5))
    with pytest.raises(zp.ShapeError, match=r"scale \(shape \(3,\)\) must be one number, or one a block of"):
        quantizer.update_params(torch.ones(3), 1)
    with pytest.raises(
        zp.SchemeError, match=r"params \(scheme int8:tensor\) must have the module's scheme, uint8"
    ):
        quantizer.update_params(QuantizationParams.int8_symmetric())
    assert all(torch.equal(tensor, before[name]) for name, tensor in quantizer.params.tensors().items())
    with pytest.raises(
        zp.RangeError, match=r"zero_point \(=3.0\) of block .* must be 0 for the symmetric int8"
    ):
        FakeQuantize.from_bits(8).update_params(1.0, 3)
    with pytest.raises(
        zp.SchemeError,
        match=r"scale must be a QuantizationParams for .* has more than positive scales of one level",
    ):
        FakeQuantize.from_tensor(normal(4, 32), "nvfp4").update_params(1.0)


def test_a_quantizer_that_is_not_enabled_returns_its_input() -> None:
    quantizer = FakeQuantize.from_bits(4, enabled=False)
    x = torch.tensor([0.3, math.nan], requires_grad=True)
    assert quantizer(x) is x
    assert quantizer.backward(torch.tensor([5.0, 6.0]), x).tolist() == [5.0, 6.0]
    assert "not enabled" in str(quantizer)
    quantizer.enabled = True
    assert quantizer(x)[0].item() == 0.0


def test_an_empty_batch_passes_through() -> None:
    x = torch.empty(0, 8, requires_grad=True)
    y = FakeQuantize.from_bits(4)(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 8)


def test_the_noise_is_the_mean_squared_error_whether_enabled_or_not() -> None:
    quantizer = FakeQuantize.from_bits(4, enabled=False)
    assert quantizer.quantization_noise(torch.tensor([0.25, 1.5, 9.0])).item() == (0.0625 * 1 + 0.25 + 4) / 3
    assert quantizer.quantization_noise(torch.empty(0)).item() == 0.0
    x = normal(64, 64, dtype=torch.bfloat16)
    error = (zp.fake_quantize(x, quantizer.params).double() - x.double()).square().mean()
    assert math.isclose(quantizer.quantization_noise(x).item(), error.item(), rel_tol=1e-12)


def test_the_gradient_passes_where_the_rounded_value_lies_within_the_codes() -> None:
    """Ends included, on the rounded value; NaN and Inf pass none."""
    quantizer = FakeQuantize.from_bits(4)
    x = torch.tensor([-8.5, -8.51, -8.0, 0.0, 7.49, 7.5, 8.0, math.nan, math.inf, -math.inf])
    wanted = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert quantizer.backward(torch.ones_like(x), x).tolist() == wanted
    with pytest.raises(zp.ShapeError, match=r"grad \(shape \(3,\)\) must have the shape of x, \(10,\)"):
        quantizer.backward(torch.ones(3), x)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_forward_and_gradient_are_those_of_torch_in_its_dialect(symmetric: bool, dtype: torch.dtype) -> None:
    low, high, zero = (-128, 127, 0) if symmetric else (0, 255, 37)
    scheme = "int8:tensor:dialect=torch" if symmetric else "uint8:tensor:asym:dialect=torch"
    quantizer = FakeQuantize(QuantizationParams.new(0.0371, zero, scheme))
    x = normal(50, 80, dtype=dtype) * 4
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = quantizer(ours)
    t = torch.fake_quantize_per_tensor_affine(theirs, 0.0371, zero, low, high)
    grad = normal(50, 80, dtype=dtype, seed=1)
    y.backward(grad)
    t.backward(grad)
    assert torch.equal(y, t)
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(quantizer.backward(grad, x), theirs.grad)
    assert 0 < int((theirs.grad == 0).sum()) < x.numel()


def test_another_seed_rounds_otherwise_and_the_same_seed_alike() -> None:
    x = normal(64, 64)
    quantizer = FakeQuantize.from_tensor(x, "int4:tensor:round=stochastic(1)")
    first = quantizer(x)
    quantizer.reseed(2)
    second = quantizer(x)
    quantizer.reseed(1)
    assert not torch.equal(first, second)
    assert torch.equal(first, quantizer(x))
    assert torch.equal(first, zp.quantize(x, quantizer.params).dequantize())
    with pytest.raises(
        zp.SchemeError, match=r"seed \(=2\) needs a scheme that rounds stochastically, got int8"
    ):
        FakeQuantize.from_bits(8).reseed(2)


def test_the_mean_of_stochastic_rounding_is_the_value() -> None:
    quantizer = FakeQuantize(QuantizationParams.new(1.0, 0, "int8:tensor:round=stochastic(1)"))
    x = torch.full((100_000,), 0.3)
    # Standard error sqrt(0.3 * 0.7 / 1e5) = 0.0015; five of them.
    assert abs(quantizer(x).mean().item() - 0.3) < 0.0075


def test_parameters_that_do_not_fit_are_refused_when_the_module_is_made() -> None:
    params = QuantizationParams.int8_symmetric()
    with pytest.raises(zp.ShapeError, match=r"scale 1 \(shape \(1,\)\) must have shape \(4, 1\)"):
        FakeQuantize(replace(params, scheme=Scheme.parse("int8:channel"), shape=(4, 8)))


def test_the_parameters_given_are_copied() -> None:
    params = QuantizationParams.int8_symmetric()
    quantizer = FakeQuantize(params)
    quantizer.update_params(3.0)
    assert params.scales[0].tolist() == [1.0]
