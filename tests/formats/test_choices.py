"""Elements whose grid the sign of the scale chooses: IF4, against a computation of its own."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

import zeropoint as zp
from zeropoint.codecs.compressed_tensors.layout import layout_of
from zeropoint.errors import FormatError, SchemeError, UnsupportedError
from zeropoint.formats import ChoiceFormat, format_name, get_format
from zeropoint.schemes import Scheme

FLOATS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FLOATS += [-value for value in FLOATS]
INTEGERS = [(code - 16 if code > 7 else code) * 6 / 7 for code in range(16)]
"""Values of the codes where the scale is negative, as fouroversix unpacks them: code << 4 >> 4, by 6 / 7."""


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * 2.0 ** torch.randint(
        -3, 4, (shape[0], 1), generator=generator
    )
    x[0, :16], x[0, 16:32] = 0.0, torch.arange(16.0) - 8
    return x


def codes_and_scales(q: zp.QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scale bytes and the tensor scale from the stored bytes alone."""
    codes = torch.stack([q.data & 15, q.data >> 4], -1).reshape(q.shape)
    return codes, q.scales[0].view(torch.uint8), q.scales[1].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_if4_is_what_its_bytes_say(dtype: torch.dtype) -> None:
    q = zp.quantize(values(24, 64).to(dtype), "if4")
    codes, scale, whole = codes_and_scales(q)
    negative = (scale >= 128).repeat_interleave(16, 1)
    assert 0 < int(negative.sum()) < negative.numel()
    factor = (scale & 127).view(torch.float8_e4m3fn).double().repeat_interleave(16, 1) * whole
    tables = torch.tensor([FLOATS, INTEGERS], dtype=torch.float64)
    expected = tables[negative.long(), codes.long()] * factor
    # Three roundings to float32: of the value, of the product of scales, of the product with it.
    assert torch.allclose(q.dequantize(torch.float32).double(), expected, rtol=2.0**-22, atol=0)
    assert not bool((negative & (codes == 8)).any())  # fouroversix has no -8


def test_each_block_takes_the_grid_of_least_squared_error() -> None:
    x = values(24, 64)
    q = zp.quantize(x, "if4")
    codes, scale, whole = codes_and_scales(q)
    largest = x.abs().amax().double()
    assert torch.allclose(whole, largest / (6 * 448), rtol=2.0**-23, atol=0)
    blocks = x.double().reshape(24, 4, 16)
    for row in range(24):
        for at in range(4):
            block, byte = blocks[row, at], int(scale[row, at])
            factor = (scale[row, at] & 127).view(torch.float8_e4m3fn).double() * whole.reshape(())
            assert torch.equal(
                (scale[row, at] & 127).view(torch.float8_e4m3fn),
                (block.abs().amax() / 6 / whole.reshape(())).float().to(torch.float8_e4m3fn),
            )
            if float(factor) == 0:
                assert byte == 0
                continue
            errors = []
            for table in (FLOATS, INTEGERS[:8] + INTEGERS[9:]):
                off = (block[:, None] - torch.tensor(table, dtype=torch.float64) * factor).abs().amin(1)
                errors.append(float(off.square().sum()))
            if abs(errors[0] - errors[1]) > 1e-6 * max(errors):
                assert (byte >= 128) == (errors[1] < errors[0])
            # All codes are nearest ones of the grid that was taken.
            table = torch.tensor(INTEGERS if byte >= 128 else FLOATS, dtype=torch.float64)
            taken = table[codes.reshape(24, 4, 16)[row, at].long()] * factor
            assert float((taken - block).square().sum()) <= min(errors) * (1 + 1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "if4", "if4_element:g32", "if4_element:channel:scale=bfloat16", "if4:round=half_away",
        "if4:round=stochastic(3)", "choice[e3m2,int6]:g16:scale=int8:scale2=float32@tensor",
    ],
)  # fmt: skip
def test_every_error_is_within_the_bound(text: str) -> None:
    for seed in range(4):
        x = values(16, 64, seed=seed)
        q = zp.quantize(x, text)
        bound = q.error_bound().repeat_interleave(64 // q.error_bound().shape[1], 1)
        off = (q.dequantize().double() - x.double()).abs()
        assert bool((off <= bound).all())
        assert torch.equal(zp.fake_quantize(x, q.params), q.dequantize())
        assert torch.equal(zp.quantize(x, q.params).data, q.data)


def test_blocks_of_integers_have_the_tighter_bound() -> None:
    q = zp.quantize(values(24, 64), "if4_element:g16")
    scale = q.scales[0].double()
    half = torch.where(scale < 0, 3 / 7, 1.0) * scale.abs()
    assert torch.allclose(q.error_bound(), half, rtol=1e-5, atol=0)


def test_if4_has_a_text_bits_and_files(tmp_path: Path) -> None:
    scheme = Scheme.parse("if4")
    assert str(scheme) == "if4_element:g16:scale=float8_e4m3fn:scale2=float32@tensor"
    assert Scheme.parse(str(scheme)) == scheme
    assert scheme.bits_per_value((64, 64)) == 4 + 8 / 16 + 32 / 64**2
    x = values(24, 64)
    q = zp.quantize(x, scheme)
    q.save(tmp_path / "q.safetensors")
    read = zp.QuantizedTensor.load(tmp_path / "q.safetensors")
    assert torch.equal(read.data, q.data)
    assert read.params == q.params
    q.params.validate()


def test_gradients_pass_where_nothing_is_clipped() -> None:
    x = values(8, 32).requires_grad_()
    y = zp.fake_quantize(x, zp.quantize(x.detach(), "if4").params)
    y.sum().backward()
    assert x.grad is not None
    assert set(x.grad.unique().tolist()) <= {0.0, 1.0}
    assert float(x.grad.mean()) > 0.9


def test_parameters_from_a_range_alone_take_the_floats() -> None:
    params = zp.QuantizationParams.from_range("if4_element:g16", -1.0, 2.0, shape=(1, 16))
    assert float(params.scales[0]) == pytest.approx(1 / 3)


def test_a_choice_is_spelled_and_read_back() -> None:
    fmt = get_format("choice[e2m1,int4]")
    assert fmt == get_format("if4_element")
    assert format_name(fmt) == "if4_element"
    other = get_format("choice[e3m2,int6]")
    assert isinstance(other, ChoiceFormat)
    assert other.stretch == Fraction(28, 31)
    assert get_format(other.spelling) == other


@pytest.mark.parametrize(
    ("text", "error", "rule"),
    [
        ("choice[int4,int4]", FormatError, "must name a float format, then an integer format"),
        ("choice[e2m1,int5]", FormatError, "must have as many bits as each other"),
        ("choice[float8_e4m3fn,int8]", FormatError, "must be a signed float format of finite numbers"),
        ("choice[e2m1,uint4]", FormatError, "must be a signed integer format"),
        ("if4_element:cast", SchemeError, "needs scales, without offsets or a center"),
        ("if4_element:g16:scale=ue4m3:scale2=float32@tensor", SchemeError, "in a format with a sign"),
        ("if4_element:g16:offset=float16", SchemeError, "needs scales, without offsets or a center"),
        ("int4:g16:scale=if4_element:scale2=float32@tensor", SchemeError, "has no numbers without a scale"),
    ],
)
def test_what_a_choice_cannot_be_is_refused(text: str, error: type[Exception], rule: str) -> None:
    with pytest.raises(error, match=rule):
        Scheme.parse(text)


def test_no_file_layout_stores_the_sign() -> None:
    with pytest.raises(UnsupportedError, match="scales whose sign chooses elements"):
        layout_of(Scheme.parse("if4"))
