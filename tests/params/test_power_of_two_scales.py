"""Power-of-two scales over every exponent of float32, against fractions and against published vectors."""

import functools
import struct
from fractions import Fraction

import pytest
import torch
from tests.tables import each

import zeropoint as zp
from zeropoint import RangeError

# Exponent and value of the largest number, and mantissa bits: OCP MX 1.0, tables 1 and 5.
ELEMENTS = {
    "float8_e4m3fn": (8, Fraction(448), 3),
    "float8_e5m2": (15, Fraction(57344), 2),
    "float6_e3m2fn": (4, Fraction(28), 2),
    "float6_e2m3fn": (2, Fraction(15, 2), 3),
    "float4_e2m1fn": (2, Fraction(6), 1),
    "int8_mx:narrow": (0, Fraction(127, 64), 6),
}
RULES = ("floor", "even", "ceil", "rceil")
LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def neighbors(value: float) -> list[float]:
    """Return a float32 with its two neighbors, those that are positive and finite."""
    code = struct.unpack("<i", struct.pack("<f", value))[0]
    codes = (code - 1, code, code + 1)
    return [struct.unpack("<f", struct.pack("<i", c))[0] for c in codes if 0 < c < 0x7F800000]


def magnitudes() -> list[float]:
    """Return numbers around each point at which some rule changes its mind, for every exponent."""
    leads = (1.0, 1.5, 1.75, 1.875, 1.9375, 1.984375, 1.9921875)
    points = {m for e in range(-149, 128) for lead in leads for m in neighbors(as_float32(lead * 2.0**e))}
    return sorted(points | {LARGEST})


def as_float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def exponent(amax: Fraction, element: str, rule: str) -> int:
    """Return the exponent that the rule's definition gives, from fractions alone."""
    emax, largest, mantissa = ELEMENTS[element]
    if rule == "floor":
        return floor_log2(amax) - emax
    if rule == "even":
        step = Fraction(2) ** (floor_log2(amax) - mantissa)
        rounded = ((amax / step + Fraction(1, 2)).__floor__()) * step
        return floor_log2(rounded) - emax
    bound = Fraction(2) ** emax if rule == "ceil" else largest
    power = floor_log2(amax / bound)
    return power if amax <= bound * Fraction(2) ** power else power + 1


MAGNITUDES = magnitudes()


@functools.cache
def exponents(element: str, rule: str) -> list[int]:
    return [exponent(Fraction(m), element, rule) for m in MAGNITUDES]


@pytest.mark.crossed
@pytest.mark.parametrize("lane", [0, 31])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_the_scale_follows_its_rule_at_every_exponent_of_float32(element: str, rule: str, lane: int) -> None:
    wanted = exponents(element, rule)
    fits = [m for m, e in zip(MAGNITUDES, wanted, strict=True) if e <= 127]
    blocks = torch.zeros(len(fits), 32)
    blocks[:, lane] = torch.tensor(fits) * torch.tensor([1.0, -1.0]).repeat(len(fits))[: len(fits)]
    scheme = element.replace(":", f":g32:scale={rule}:") if ":" in element else f"{element}:g32:scale={rule}"
    stored = zp.choose_params(blocks, scheme).scales[0]
    assert stored.dtype == torch.float8_e8m0fnu
    assert stored.view(torch.uint8).flatten().tolist() == [max(e, -127) + 127 for e in wanted if e <= 127]
    assert len(fits) > 5000


@pytest.mark.parametrize("rule", ["ceil", "rceil"])
def test_a_block_that_needs_a_scale_past_the_largest_is_refused(rule: str) -> None:
    block = torch.full((1, 32), LARGEST)
    with pytest.raises(RangeError, match=r"a block needs scale 2\*\*128, past the largest of"):
        zp.choose_params(block, f"int8_mx:g32:scale={rule}:narrow")


@each("power", range(-148, 128))
def test_one_ulp_below_a_power_of_two_belongs_to_the_exponent_below(power: int) -> None:
    """A float log2 rounds up here."""
    below = neighbors(2.0**power)[0]
    block = torch.full((1, 32), below)
    byte = int(zp.choose_params(block, "mxfp8_e4m3").scales[0].view(torch.uint8))
    assert byte == max(0, floor_log2(Fraction(below)) - 8 + 127)
    assert floor_log2(Fraction(below)) == power - 1


# Scale byte and dequantized largest value for FP4, by rule: checked against torchao, compressed-tensors,
# ModelOpt and the OCP text.
TABLE = [
    (1.5, {"floor": (125, 1.5), "even": (125, 1.5), "rceil": (125, 1.5), "ceil": (126, 1.5)}),
    (1.5000001, {"floor": (125, 1.5), "even": (125, 1.5), "rceil": (126, 1.5), "ceil": (126, 1.5)}),
    (1.75, {"floor": (125, 1.5), "even": (126, 2.0), "rceil": (126, 2.0), "ceil": (126, 2.0)}),
    (1.9999999, {"floor": (125, 1.5), "even": (126, 2.0), "rceil": (126, 2.0), "ceil": (126, 2.0)}),
    (3.5, {"floor": (126, 3.0), "even": (127, 4.0), "rceil": (127, 4.0), "ceil": (127, 4.0)}),
    (6.0, {"floor": (127, 6.0), "even": (127, 6.0), "rceil": (127, 6.0), "ceil": (128, 6.0)}),
    (7.0, {"floor": (127, 6.0), "even": (128, 8.0), "rceil": (128, 8.0), "ceil": (128, 8.0)}),
]


@pytest.mark.crossed
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("amax", "wanted"), TABLE)
def test_fp4_blocks_have_the_published_scale_and_value(
    amax: float, wanted: dict[str, tuple[int, float]], rule: str
) -> None:
    q = zp.quantize(torch.tensor([[amax] + [0.0] * 31]), f"mxfp4_e2m1:scale={rule}")
    byte, value = wanted[rule]
    assert int(q.scales[0].view(torch.uint8)) == byte
    assert float(q.dequantize()[0, 0]) == value


def test_compressed_tensors_rounds_mxfp8_scales_at_the_threshold_of_fp4() -> None:
    block = torch.tensor([[1.75] + [0.0] * 31])
    ours = zp.choose_params(block, "float8_e4m3fn:g32:scale=even").scales[0].view(torch.uint8)
    theirs = zp.choose_params(block, "float8_e4m3fn:g32:scale=even:dialect=compressed-tensors").scales[0]
    assert (int(ours), int(theirs.view(torch.uint8))) == (127 - 8, 127 - 8 + 1)


@pytest.mark.parametrize(
    "preset", ["mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8"]
)
def test_a_zero_block_has_scale_byte_zero_and_zero_codes(preset: str) -> None:
    x = torch.cat([torch.zeros(1, 32), torch.ones(1, 32)])
    q = zp.quantize(x, preset)
    assert q.scales[0].view(torch.uint8)[0].tolist() == [0]
    assert not q.codes[0].any()
    assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize("preset", ["mxfp4_e2m1", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8"])
def test_the_smallest_subnormal_gives_scale_byte_zero(preset: str) -> None:
    """There is no logarithm of zero on the way."""
    x = torch.full((1, 32), 2.0**-149)
    q = zp.quantize(x, preset)
    assert int(q.scales[0].view(torch.uint8)) == 0
    step = {"mxfp4_e2m1": 2.0**-1, "mxfp8_e4m3": 2.0**-9, "mxfp8_e5m2": 2.0**-16, "mxint8": 2.0**-6}[preset]
    # 2**-149 / 2**-127 = 2**-22 of a unit lies below half the least step of each format.
    assert step / 2 > 2.0**-22
    assert not q.dequantize().any()


@pytest.mark.parametrize("byte", [0, 1, 127, 253, 254])
def test_every_finite_scale_byte_decodes_to_its_power(byte: int) -> None:
    """Byte 0 is 2**-127, a subnormal, and not zero."""
    params = zp.QuantizationParams(
        scheme=zp.Scheme.parse("mxfp4_e2m1"),
        shape=(1, 2),
        scales=(torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu),),
    )
    params.validate()
    effective = params.effective_scale()
    assert effective is not None
    assert Fraction(float(effective)) == Fraction(2) ** (byte - 127)


def test_scale_byte_255_is_nan_and_refused() -> None:
    scale = torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    params = zp.QuantizationParams(scheme=zp.Scheme.parse("mxfp4_e2m1"), shape=(1, 2), scales=(scale,))
    with pytest.raises(RangeError, match=r"scale 1 \(=nan\) of block \(0, 0\) must be finite"):
        params.validate()
    data = torch.tensor([[0x77]], dtype=torch.uint8)
    q = zp.QuantizedTensor(data=data, params=params, shape=(1, 2), dtype=torch.float32)
    assert torch.isnan(q.dequantize()).all()


def test_float64_past_the_largest_scale_is_refused_and_below_the_least_is_kept() -> None:
    with pytest.raises(RangeError, match=r"a block needs scale 2\*\*198, past the largest"):
        zp.choose_params(torch.full((1, 32), 2.0**200, dtype=torch.float64), "mxfp4_e2m1")
    small = zp.choose_params(torch.full((1, 32), 2.0**-400, dtype=torch.float64), "mxfp4_e2m1")
    assert int(small.scales[0].view(torch.uint8)) == 0
