"""Quark's configuration types (quark.torch.quantization.config.type): a test for each name, in numpy.

Where the documentation says no rule, the rule is the one that it cites: OCP MX 1.0, arXiv:2302.08007 for mx6
and mx9, arXiv:1903.08066 and arXiv:1805.07941 for thresholds.
"""

import enum
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint import recipes
from zeropoint.models.graph import quantize_graph
from zeropoint.recipes import (
    DeviceType,
    Dtype,
    QSchemeType,
    QuantizationMode,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
    scheme_from_quark,
)
from zeropoint.training import LearnedThreshold, ThresholdRule

F32 = np.float32


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def integers(
    x: np.ndarray, low: int, high: int, axes: int | tuple[int, ...] | None = None, *, affine: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and values by the usual formulas: half the range over half the codes, or all of both."""
    least = np.minimum(x.min(axes, keepdims=True), 0).astype(F32)
    most = np.maximum(x.max(axes, keepdims=True), 0).astype(F32)
    if affine:
        scale = (most - least) / F32(high - low)
        zero = np.rint(low - least / scale)
    else:
        half = F32(high if low == 0 else (high - low) / 2)
        scale, zero = np.maximum(-least, most) / half, F32(0)
    codes = np.clip(np.rint(x / scale) + zero, low, high)
    return codes, (codes - zero).astype(F32) * scale


def of_spec(x: torch.Tensor, **spec: object) -> tuple[np.ndarray, np.ndarray]:
    q = zp.quantize(x, scheme_from_quark(spec))
    return q.codes.numpy(), q.dequantize().float().numpy()


def test_enumerations_as_types() -> None:
    wanted = {
        QSchemeType: "per_tensor per_channel per_group per_block",
        ZeroPointType: "int32 float32",
        Dtype: "int8 uint8 int16 uint16 int32 uint32 int4 uint4 int3 int2 uint2 bfloat16 float16 fp8_e4m3 "
        "fp8_e5m2 fp8_e5m3 fp6_e3m2 fp6_e2m3 fp4 mx mx6 mx9 bfp16",
        ScaleType: "float pof2 float32 float16 bfloat16 float8_e5m3 float8_e8m0fnu",
        RoundType: "round floor half_even",
        DeviceType: "CPU IPU",
        QuantizationMode: "eager_mode fx_graph_mode",
        TQTThresholdInitMeth: "_3SD _LL_J",
    }
    for kind, names in wanted.items():
        assert issubclass(kind, enum.Enum)
        assert [member.name for member in kind] == names.split()
        assert getattr(recipes, kind.__name__) is kind
    spec = {
        "dtype": Dtype.int4,
        "qscheme": QSchemeType.per_group,
        "group_size": 32,
        "scale_type": ScaleType.float,
    }
    foreign = enum.Enum("Foreign", {"int4": 1, "per_group": 2})
    assert scheme_from_quark(spec) == scheme_from_quark(
        {"dtype": foreign.int4, "qscheme": foreign.per_group, "group_size": 32, "scale_type": "float"}  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("affine", [False, True])
def test_qscheme_per_tensor(affine: bool) -> None:
    x = numbers(8, 64)
    found = of_spec(x, dtype="int8", qscheme="per_tensor", symmetric=not affine)
    assert all(map(np.array_equal, found, integers(x.numpy(), -128, 127, affine=affine)))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_qscheme_per_channel(axis: int) -> None:
    x = numbers(8, 64)
    found = of_spec(x, dtype="int8", qscheme="per_channel", ch_axis=axis)
    assert all(map(np.array_equal, found, integers(x.numpy(), -128, 127, 1 if axis == 0 else 0)))


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_qscheme_per_group(axis: int) -> None:
    x = numbers(64, 64)
    along = x.numpy() if axis in (1, -1) else x.numpy().T
    blocks = along.reshape(64, 2, 32)
    wanted = integers(blocks, -8, 7, 2)[0].reshape(64, 64)
    found, _ = of_spec(x, dtype="int4", qscheme="per_group", group_size=32, ch_axis=axis)
    assert np.array_equal(found, wanted if axis in (1, -1) else wanted.T)
    # A short last group is a group.
    short = of_spec(numbers(2, 40), dtype="int4", qscheme="per_group", group_size=32)[0]
    assert np.array_equal(short[:, 32:], integers(numbers(2, 40).numpy()[:, 32:], -8, 7, 1)[0])


def test_zero_point_type_int32() -> None:
    x = numbers(8, 64) + 2
    scheme = scheme_from_quark({"dtype": "uint8", "symmetric": False, "zero_point_type": "int32"})
    q = zp.quantize(x, scheme)
    assert q.zero_point is not None
    assert q.zero_point.dtype is torch.int32
    codes, values = integers(x.numpy(), 0, 255, affine=True)
    assert np.array_equal(q.codes.numpy(), codes)
    assert np.array_equal(q.dequantize().numpy(), values)


@pytest.mark.parametrize(("dtype", "top", "low", "high"), [("uint4", 15, -3.0, 8.0), ("uint2", 3, -5.0, 6.0)])
def test_zero_point_type_float32(dtype: str, top: int, low: float, high: float) -> None:
    x = torch.linspace(low, high, 64)
    scheme = scheme_from_quark({"dtype": dtype, "symmetric": False, "zero_point_type": "float32"})
    q = zp.quantize(x, scheme)
    assert q.zero_point is not None
    assert q.zero_point.is_floating_point()
    scale = (high - low) / top
    assert q.scales[0].item() == pytest.approx(scale, rel=1e-6)
    assert q.zero_point.item() == pytest.approx(-low / scale, rel=1e-6)
    values = np.rint(x.numpy() / scale - low / scale) * scale + low
    assert np.allclose(q.dequantize().numpy(), values, atol=1e-5)


def test_dtype_int8() -> None:
    x = numbers(8, 64)
    assert np.array_equal(of_spec(x, dtype="int8")[0], integers(x.numpy(), -128, 127)[0])
    x[0, 0] = -100
    assert of_spec(x, dtype="int8", symmetric=False)[0].min() == -128


def test_dtype_uint8() -> None:
    x = numbers(8, 64).abs()
    assert np.array_equal(of_spec(x, dtype="uint8")[0], integers(x.numpy(), 0, 255)[0])
    assert np.array_equal(
        of_spec(x - 1, dtype="uint8", symmetric=False)[0], integers((x - 1).numpy(), 0, 255, affine=True)[0]
    )


def test_dtype_int4() -> None:
    x = numbers(8, 64)
    assert np.array_equal(of_spec(x, dtype="int4")[0], integers(x.numpy(), -8, 7)[0])
    assert zp.quantize(x, scheme_from_quark({"dtype": "int4"})).data.numel() == x.numel() // 2


def test_dtype_uint4() -> None:
    x = numbers(8, 64).abs()
    assert np.array_equal(of_spec(x, dtype="uint4")[0], integers(x.numpy(), 0, 15)[0])


def test_dtype_bfloat16() -> None:
    x = numbers(8, 64)
    assert np.array_equal(of_spec(x, dtype="bfloat16")[1], x.numpy().astype(ml_dtypes.bfloat16).astype(F32))


def test_dtype_float16() -> None:
    x = numbers(8, 64)
    assert np.array_equal(of_spec(x, dtype="float16")[1], x.numpy().astype(np.float16).astype(F32))
    largest = float(np.finfo(np.float16).max)
    assert of_spec(torch.tensor([1e6, -1e6]), dtype="float16")[1].tolist() == [largest, -largest]


def minifloat_values(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """Return all values of a sign, exponents of the usual bias and subnormals, up to the largest."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    subnormal = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    normal = [(1 + m / steps) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for m in range(steps)]
    magnitudes = [v for v in (*subnormal, *normal) if v <= largest]
    assert magnitudes[-1] == largest
    return np.array(sorted({*magnitudes, *(-v for v in magnitudes)}))


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the nearest value; of two as near the one with an even place in the table of magnitudes."""
    magnitudes = values[values >= 0]
    place = np.clip(np.searchsorted(magnitudes, np.abs(x)), 1, len(magnitudes) - 1)
    below, above = magnitudes[place - 1], magnitudes[place]
    down, up = np.abs(x) - below, above - np.abs(x)
    chosen = np.where((down < up) | ((down == up) & ((place - 1) % 2 == 0)), below, above)
    result: np.ndarray = np.copysign(chosen, x)
    return result


def assert_minifloat(dtype: str, exponent_bits: int, mantissa_bits: int, largest: float) -> None:
    values = minifloat_values(exponent_bits, mantissa_bits, largest)
    x = numbers(16, 256)
    scale = np.abs(x.numpy()).max() / F32(largest)
    wanted = nearest((x.numpy() / scale).astype(np.float64), values).astype(F32) * scale
    assert len(np.unique(np.abs(wanted))) > min(7, len(values) // 4)
    assert np.array_equal(of_spec(x, dtype=dtype)[1], wanted)
    middles = torch.from_numpy((values[1:] + values[:-1]) / 2).float()
    middles = torch.cat([middles, torch.tensor([largest])])
    assert np.array_equal(
        of_spec(middles, dtype=dtype)[1], nearest(middles.double().numpy(), values).astype(F32)
    )


def test_dtype_fp8_e4m3() -> None:
    assert_minifloat("fp8_e4m3", 4, 3, 1.75 * 2.0**8)


def test_dtype_fp8_e5m2() -> None:
    assert_minifloat("fp8_e5m2", 5, 2, 1.75 * 2.0**15)


def test_dtype_fp6_e3m2() -> None:
    assert_minifloat("fp6_e3m2", 3, 2, 1.75 * 2.0**4)


def test_dtype_fp6_e2m3() -> None:
    assert_minifloat("fp6_e2m3", 2, 3, 1.875 * 2.0**2)


def test_dtype_fp4() -> None:
    assert_minifloat("fp4", 2, 1, 1.5 * 2.0**2)


OCP = {
    "fp8_e4m3": (minifloat_values(4, 3, 1.75 * 2.0**8), 3),
    "fp8_e5m2": (minifloat_values(5, 2, 1.75 * 2.0**15), 2),
    "fp6_e3m2": (minifloat_values(3, 2, 1.75 * 2.0**4), 2),
    "fp6_e2m3": (minifloat_values(2, 3, 1.875 * 2.0**2), 3),
    "fp4": (minifloat_values(2, 1, 1.5 * 2.0**2), 1), "int8": (np.arange(-127, 128) / 64, 6),
}  # fmt: skip
"""Element types of OCP MX: values and mantissa bits."""


@pytest.mark.crossed
@pytest.mark.parametrize("mode", ["floor", "even"])
@pytest.mark.parametrize("element", OCP)
def test_dtype_mx(element: str, mode: str) -> None:
    values, mantissa = OCP[element]
    x = numbers(8, 128)
    blocks = x.numpy().astype(np.float64).reshape(8, 4, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    exponent = np.floor(np.log2(amax))
    if mode == "even":
        exponent += amax / 2**exponent + 2.0 ** -(mantissa + 1) >= 2
    scale = 2.0 ** (exponent - math.floor(math.log2(values.max())))
    wanted = nearest(np.clip(blocks / scale, values.min(), values.max()), values) * scale
    found = of_spec(x, dtype="mx", mx_element_dtype=element, scale_calculation_mode=mode)[1]
    assert np.array_equal(found, wanted.reshape(8, 128).astype(F32))
    for wrong in ({"scale_type": "float16"}, {"qscheme": "per_tensor"}, {"symmetric": True}):
        with pytest.raises(zp.RecipeError):
            scheme_from_quark({"dtype": "mx", "mx_element_dtype": element, **wrong})
    with pytest.raises(zp.RecipeError, match="must be one of"):
        scheme_from_quark({"dtype": "mx", "mx_element_dtype": "mx9"})


def microexponents(x: np.ndarray, mantissa: int, size: int = 16) -> np.ndarray:
    """Return the values of arXiv:2302.08007, section 3: an exponent for 16, a bit of shift for each 2."""
    blocks = x.astype(np.float64).reshape(-1, size // 2, 2)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1)))
    shared = exponents.max(-1, keepdims=True)
    shift = np.minimum(shared - exponents, 1)
    step = 2.0 ** (shared - shift - (mantissa - 1))[..., None]
    most = 2**mantissa - 1
    result: np.ndarray = (np.clip(np.rint(blocks / step), -most, most) * step).reshape(x.shape)
    return result


@pytest.mark.parametrize("size", [16, 32])
def test_dtype_mx6(size: int) -> None:
    x = numbers(8, 128)
    found = of_spec(x, dtype="mx6", group_size=size)[1]
    assert np.array_equal(found, microexponents(x.numpy(), 4, size).astype(F32))
    assert zp.quantize(x, scheme_from_quark({"dtype": "mx6"})).bits_per_value == 6


@pytest.mark.parametrize("size", [16, 32])
def test_dtype_mx9(size: int) -> None:
    x = numbers(8, 128)
    found = of_spec(x, dtype="mx9", group_size=size)[1]
    assert np.array_equal(found, microexponents(x.numpy(), 7, size).astype(F32))
    assert zp.quantize(x, scheme_from_quark({"dtype": "mx9"})).bits_per_value == 9


def test_scale_type_float() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = numbers(8, 64).to(dtype)
        q = zp.quantize(x, scheme_from_quark({"dtype": "int8", "scale_type": "float"}))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        assert torch.equal(
            q.scales[0].flatten(), (x.abs().max().to(wide) / ((2**8 - 1) / 2)).to(dtype).reshape(1)
        )


@pytest.mark.crossed
@pytest.mark.parametrize("amax", [1.0, 1.1, 1.9, 2.0, 127 / 64, 128 / 64, 0.013, 300.0])
@pytest.mark.parametrize(("dtype", "most"), [("int8", 127), ("int4", 7)])
def test_scale_type_pof2(dtype: str, most: int, amax: float) -> None:
    x = torch.tensor([amax, -amax / 3])
    q = zp.quantize(x, scheme_from_quark({"dtype": dtype, "scale_type": "pof2"}))
    scale = q.scales[0].float().item()
    assert math.frexp(scale)[0] == 0.5
    # The smallest power of two that clips nothing, where half a code range is (2 ** bits - 1) / 2.
    assert float(x.max()) / scale <= most + 0.5 < float(x.max()) / (scale / 2)
    assert int(q.codes.abs().max()) > most // 2


def test_scale_type_float32() -> None:
    x = numbers(8, 64).to(torch.bfloat16)
    q = zp.quantize(x, scheme_from_quark({"dtype": "int8", "scale_type": "float32"}))
    assert q.scales[0].item() == np.abs(x.float().numpy()).max() / F32((2**8 - 1) / 2)


def test_scale_type_float16() -> None:
    x = numbers(8, 64)
    q = zp.quantize(x, scheme_from_quark({"dtype": "int8", "scale_type": "float16"}))
    assert q.scales[0].item() == np.float16(np.abs(x.numpy()).max() / F32((2**8 - 1) / 2))
    with pytest.raises(zp.RangeError, match="does not fit"):
        zp.quantize(x * 1e9, q.scheme)


def test_scale_type_bfloat16() -> None:
    x = numbers(8, 64)
    q = zp.quantize(x, scheme_from_quark({"dtype": "int8", "scale_type": "bfloat16"}))
    assert q.scales[0].item() == float(ml_dtypes.bfloat16(np.abs(x.numpy()).max() / F32((2**8 - 1) / 2)))


TIES: Sequence[float] = (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.3, -0.3, 1.7, -1.7, 127.5)


def rounded_ties(method: str) -> list[int]:
    """Return the codes of quotients on ties and elsewhere: the last number makes the scale 1."""
    codes, _ = of_spec(torch.tensor(TIES), dtype="int8", round_method=method)
    result: list[int] = codes[:-1].tolist()
    return result


def test_round_type_round() -> None:
    away = [math.copysign(math.floor(abs(x) + 0.5), x) for x in TIES[:-1]]
    assert rounded_ties("round") == away


def test_round_type_floor() -> None:
    assert rounded_ties("floor") == np.floor(TIES[:-1]).tolist()


def test_round_type_half_even() -> None:
    assert rounded_ties("half_even") == np.rint(TIES[:-1]).tolist()


def test_device_type_cpu() -> None:
    plain = scheme_from_quark({"dtype": "int8"})
    assert scheme_from_quark({"dtype": "int8", "target_device": DeviceType.CPU, "device": "CPU"}) == plain


def test_device_type_ipu() -> None:
    plain = scheme_from_quark({"dtype": "int8"})
    assert scheme_from_quark({"dtype": "int8", "target_device": DeviceType.IPU}) == plain
    with pytest.raises(zp.RecipeError, match="target_device 'GPU' is unknown; known are CPU, IPU"):
        scheme_from_quark({"dtype": "int8", "target_device": "GPU"})


def two_layers() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
    return net.requires_grad_(False), torch.randn(16, 32)


def test_quantization_mode_eager_mode() -> None:
    assert scheme_from_quark({"dtype": "int8", "quant_mode": QuantizationMode.eager_mode}).bits == 8
    net, x = two_layers()
    y = zp.quantize_model(net, "w8a8").model(x)
    assert 0 < float((y - net(x)).norm() / net(x).norm()) < 0.05


def test_quantization_mode_fx_graph_mode() -> None:
    assert scheme_from_quark({"dtype": "int8", "quant_mode": QuantizationMode.fx_graph_mode}).bits == 8
    net, x = two_layers()
    eager = zp.quantize_model(net, "w8a8").model(x)
    program = torch.export.export(net, (x,))
    graph = quantize_graph(program, "w8a8").model(x)
    assert torch.allclose(graph, eager, atol=1e-5)


def test_tqt_threshold_init_meth_3sd() -> None:
    x = numbers(1000) + 0.5
    wanted = abs(float(x.double().mean())) + 3 * float(np.std(x.double().numpy()))
    quantizer = LearnedThreshold.from_tensor(x, "int8", ThresholdRule("_3SD"))
    assert 2.0 ** quantizer.log2_threshold.item() == pytest.approx(wanted, rel=1e-6)


def j_threshold(x: np.ndarray, levels: int) -> float:
    """Return the threshold of Algorithm 1 of arXiv:1805.07941, in numpy."""
    top = np.abs(x).max()
    bins = math.ceil(top / ((top - np.abs(x).min()) / math.sqrt(x.size)))
    counts, _ = np.histogram(np.abs(x), bins, (0, top))
    whole = np.cumsum(counts / counts.sum())
    found = []
    for end in range(levels + 1, bins + 1):
        p = whole.copy()
        p[end - 1 :] = 1.0
        q, places = p.copy(), np.linspace(0, 1, end)
        coarse = np.interp(np.linspace(0, 1, levels), places, p[:end])
        q[:end] = np.interp(places, np.linspace(0, 1, levels), coarse)
        both = (whole > 0) & (q > 0)
        found.append(float(((whole[both] - q[both]) * np.log2(whole[both] / q[both])).sum()))
    return float((int(np.argmin(found)) + levels + 1 + 0.5) * top / bins)


def test_tqt_threshold_init_meth_ll_j() -> None:
    for seed in range(5):
        x = numbers(900, seed=seed) ** 3
        wanted = j_threshold(x.double().numpy(), 8)
        quantizer = LearnedThreshold.from_tensor(x, "int4", ThresholdRule("_LL_J"))
        assert 2.0 ** quantizer.log2_threshold.item() == pytest.approx(wanted, rel=1e-6)


def test_names_3sd_and_ll_j_as_arguments() -> None:
    assert ThresholdRule(TQTThresholdInitMeth._3SD) is ThresholdRule("_3SD") is ThresholdRule.THREE_SD
    assert ThresholdRule(TQTThresholdInitMeth._LL_J) is ThresholdRule("_KL_J") is ThresholdRule.KL_J
    for wrong in ("_3SD", "nonsense", None, 7):
        with pytest.raises(zp.SchemeError, match="must be a ThresholdRule"):
            LearnedThreshold.from_tensor(numbers(10), "int8", wrong)  # type: ignore[arg-type]
