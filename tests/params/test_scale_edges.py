"""Data on which scales once clipped, vanished or had a bound that was too small, one test each."""

import math
from pathlib import Path

import pytest
import torch
from tests.tensors import normal

import zeropoint as zp
from zeropoint.layout.blocks import spread_blocks


def checked(x: torch.Tensor, scheme: str) -> float:
    """Return the relative error of a quantized tensor, after its parameters and its bound were checked."""
    q = zp.quantize(x, scheme)
    q.params.validate()
    error = (q.dequantize().double() - x.double()).abs()
    bound = spread_blocks(q.error_bound(), q.scheme.granularity, q.shape).expand(q.shape)
    assert bool(torch.isfinite(bound).all())
    assert bool((error <= bound).all()), f"{scheme}: error {float(error.max())}, bound {float(bound.max())}"
    return float(error.norm() / x.double().norm())


@pytest.mark.parametrize(
    ("scheme", "factor", "dtype", "relative"),
    [
        ("int4:g16:scale=float16:scale2=bfloat16@tensor", 1.0, torch.float32, 0.1),
        ("int4:g16:scale=bfloat16:scale2=float32@tensor", 100.0, torch.float32, 0.1),
        ("int8:channel:scale2=float32@tensor", 1e4, torch.float32, 0.01),
        ("int8:g16:scale=input:scale2=input@tensor", 1e-3, torch.float16, 0.01),
        ("float4_e2m1fn:g16:scale=ue4m3:scale2=ue5m3@tensor", 1e-3, torch.float32, 0.15),
        ("int8:g4:scale2=float32@g16:scale3=float32@tensor", 1.0, torch.float32, 0.01),
        ("int4:g4:scale=ue4m3:scale2=float32@g16:scale3=float32@tensor", 1.0, torch.float32, 0.1),
    ],
)
def test_every_level_of_scales_fits_its_format(
    scheme: str, factor: float, dtype: torch.dtype, relative: float
) -> None:
    """Coarse scales that were rounded down gave Inf, NaN or zeros; linear middle levels were left out."""
    for seed in range(20):
        assert checked((normal(4, 64, seed=seed) * factor).to(dtype), scheme) < relative


def test_a_scale_rounded_up_below_another_level_clips_nothing() -> None:
    x = torch.full((1, 4), -5988.0)
    assert checked(x, "int8_mx:channel:scale=linear_up/bfloat16:scale2=float32@tensor") < 0.004


@pytest.mark.parametrize("number", [8.4e6, 1e8])
def test_a_scale_past_its_format_is_refused_where_it_is_rounded_up_too(number: float) -> None:
    with pytest.raises(zp.RangeError, match="does not fit linear_up/float16"):
        zp.quantize(torch.tensor([number, 1.0]), "int8:tensor:scale=linear_up/float16")
    assert checked(torch.tensor([8.3e6, 1.0]), "int8:tensor:scale=linear_up/float16") < 0.01


def test_a_coarse_scale_is_rounded_up_where_the_scheme_says_so() -> None:
    for seed in range(40):
        x = normal(4, 16, seed=seed)
        down, up = (
            zp.quantize(x, f"int8:g4:scale=ue4m3:scale2={rule}bfloat16@tensor").scales[1].double().item()
            for rule in ("", "linear_up/")
        )
        exact = float(x.abs().max()) / (127.5 * 448)
        assert exact <= up <= exact * (1 + 2.0**-7)
        assert down <= up
        assert checked(x, "int8:g4:scale=linear_up/ue4m3:scale2=bfloat16@tensor") < 0.02


@pytest.mark.parametrize(
    ("scheme", "extent"),
    [
        ("int8:tensor:dialect=compressed-tensors", 1e-5),
        ("int8:channel:dialect=onnx-reference", 1e-5),
        ("int8:channel:dialect=onnx", 1e-5),
        ("int4:tensor:dialect=compressed-tensors", 1e-6),
        ("int10:tensor:dialect=compressed-tensors", 1e-4),
        ("float8_e4m3fn:tensor:dialect=compressed-tensors", 1e-5),
    ],
)
def test_the_bound_knows_in_which_dtype_a_scale_was_computed(scheme: str, extent: float) -> None:
    """Scales that were rounded to float16 and are stored as float32 cut off up to twenty steps."""
    for part in range(20):
        x = (torch.linspace(-1, 1, 41)[None] * (extent * (1 + part / 20))).half()
        assert checked(x, scheme) < 0.4


@pytest.mark.parametrize(
    ("scheme", "largest", "dtype"),
    [
        ("int2:tensor", 49_152.0, torch.float16),
        ("mxfp4:scale=even", 57_344.0, torch.float16),
        ("int4:tensor", 61_440.0, torch.float16),
        ("mxfp8_e4m3:scale=even", 64_000.0, torch.float16),
        ("int8:tensor", 65_504.0, torch.float16),
        ("int2:tensor", torch.finfo(torch.bfloat16).max, torch.bfloat16),
        ("int8:tensor", torch.finfo(torch.float32).max, torch.float32),
    ],
)
def test_the_bound_is_inf_where_dequantizing_overflows(
    scheme: str, largest: float, dtype: torch.dtype
) -> None:
    q = zp.quantize(torch.tensor([-largest, 1.0], dtype=torch.float64).to(dtype), scheme)
    assert q.dequantize()[0] == -math.inf
    assert q.error_bound().tolist() == [math.inf]


@pytest.mark.parametrize("scheme", ["float64:tensor:scale=floor", "float64:g4:scale=rceil"])
def test_elements_past_every_power_of_two_have_an_infinite_bound(scheme: str) -> None:
    assert zp.quantize(torch.ones(4), scheme).error_bound().tolist() == [math.inf]


def test_a_power_of_two_between_those_of_a_table_is_rounded_up() -> None:
    """Of 60 the even rule asks for 2**-1, which the table lacks: 0.25 would clip by half."""
    scheme = "int8:tensor:scale=even/codebook[1,2,4,0.25]"
    q = zp.quantize(torch.tensor([60.0, 0.1]), scheme)
    assert q.params.effective_scale().tolist() == [1.0]
    assert checked(torch.tensor([60.0, 0.1]), scheme) < 0.01
    checked(torch.tensor([0.4, 0.1]), scheme)


@pytest.mark.crossed
@pytest.mark.parametrize("dialect", ["torch", "compressed-tensors"])
@pytest.mark.parametrize("scale", ["ue4m3", "ue5m3", "e5m2", "e3m4"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_scale_of_zeros_is_one_that_its_format_holds(
    backend: str, scale: str, dialect: str, tmp_path: Path
) -> None:
    """The dialects' own scale of a block of zeros rounds to 0 in these formats."""
    with zp.only_backend(backend):
        q = zp.quantize(torch.zeros(1, 7), f"codebook[-0.5,0.45]:g7:scale={scale}:dialect={dialect}")
    q.params.validate()
    assert q.codes.tolist() == [[1] * 7]
    q.save(tmp_path / "zeros.safetensors")
    assert zp.QuantizedTensor.load(tmp_path / "zeros.safetensors").params == q.params


@pytest.mark.parametrize("scale", ["ue4m3", "ue5m3"])
def test_real_zero_points_of_zeros_are_numbers(scale: str) -> None:
    q = zp.quantize(torch.zeros(1, 7), f"uint4:g7:asym=real:scale={scale}:dialect=torch")
    assert q.dequantize().tolist() == [[0.0] * 7]


def test_a_real_zero_point_does_not_widen_a_range_without_zero() -> None:
    q = zp.quantize(torch.tensor([10.0, 10.3, 11.0]), "uint4:tensor:asym=real")
    assert q.scales[0].item() == pytest.approx(1 / 15)
    assert q.dequantize().tolist() == pytest.approx([10.0, 10 + 5 / 15, 11.0], rel=2**-18)
    assert q.error_bound().item() == pytest.approx(1 / 30, rel=1e-2)


@pytest.mark.parametrize("coarse", ["ue5m3", "float8_e5m2"])
def test_a_coarse_scale_that_would_round_down_too_far_is_rounded_up(coarse: str) -> None:
    """Else the finest scale of the largest block would lie past the end of its format."""
    for step in range(0, 200, 3):
        x = torch.zeros(2, 32)
        x[0, 0] = 2.0 ** (step / 50)
        assert checked(x, f"float4_e2m1fn:g16:scale=ue4m3:scale2={coarse}@tensor") < 0.15
