"""Two levels of scales in rows that a kernel takes a few at a time: bytes and errors of the reference."""

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.kernels.cpu.encode.power_levels import Powers
from zeropoint.kernels.cpu.host import calls, microexponents
from zeropoint.kernels.cpu.machine.named_records import record_type
from zeropoint.kernels.cpu.machine.tile import FEW
from zeropoint.schemes import Scheme

pytestmark = pytest.mark.rotating

POWERS = (
    "mx9", "mx6", "mx4", "int8_mx:g4:scale=even/e8m0:scale2=floor@g32",
    "float4_e2m1fn:g2:scale=floor/microexponent:scale2=floor@g8",
)  # fmt: skip
LEVELS = (*POWERS, "q3_k", "int4:g8:scale=int6:scale2=float16@g64")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((21, 768), (2, 3, 256), (2, 2 * FEW + 256))


def numbers(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 6.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    powers = torch.exp2(torch.randn(shape, generator=generator) * spread)
    x = (torch.randn(shape, generator=generator) * powers).clamp(-6e4, 6e4).to(dtype)
    x[..., :70] = 0
    return x


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_reference(scheme: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(shape, dtype)
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
        values = expected.dequantize()
    found = zp.quantize(x, scheme)
    assert torch.equal(found.data, expected.data)
    assert found.params == expected.params == zp.choose_params(x, scheme)
    assert torch.equal(found.dequantize(), values)


@pytest.mark.parametrize("scheme", ["mx9", POWERS[3]])
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-135, 2.0**-126, 2.0**125])
def test_the_ends_of_float32_are_those_of_the_reference(scheme: str, size: float) -> None:
    x = numbers((4, 256), torch.float32, spread=1.0).clamp(-3, 3) * size
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
        values = expected.dequantize()
    found = zp.quantize(x, scheme)
    assert torch.equal(found.data, expected.data)
    assert found.params == expected.params
    assert torch.equal(found.dequantize(), values)


@pytest.mark.parametrize("cols", [20, 24, 3000])
def test_coarse_blocks_that_end_within_a_byte_are_joined_or_taken_by_rows(cols: int) -> None:
    scheme = "mx4_element:g2:scale=floor/microexponent:scale2=floor@g4"
    x = numbers((5, cols), torch.bfloat16)
    assert microexponents.pair_of(Scheme.parse(scheme), (5, cols), x.dtype) is not None
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
    found = zp.quantize(x, scheme)
    assert torch.equal(found.data, expected.data)
    assert found.params == expected.params


def test_the_kernels_know_these_schemes() -> None:
    for text in LEVELS:
        for shape in SHAPES:
            scheme = Scheme.parse(text)
            assert calls.levels_call(scheme, shape, torch.float32, torch.float32) is not None
            pair = microexponents.pair_of(scheme, shape, torch.float32)
            assert (pair is not None) == (text in POWERS)


@pytest.mark.parametrize(
    ("scheme", "cols", "in_steps"),
    [
        ("mx9", 256, True),
        ("mx4", 32, True),
        ("mx6", 48, False),
        (POWERS[3], 256, False),
        (POWERS[4], 256, False),
    ],
)
def test_pairs_in_blocks_of_sixteen_are_taken_in_steps(scheme: str, cols: int, in_steps: bool) -> None:
    pair = microexponents.pair_of(Scheme.parse(scheme), (4, cols), torch.float32)
    assert pair is not None
    assert (np.frombuffer(pair.powers, record_type(Powers))["top_code"][0] > 0) == in_steps


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["mx9", "mx9_element:g2:scale=floor/microexponent:scale2=floor/e5m0@g16"])
def test_blocks_of_zeros_next_to_others_are_those_of_the_reference(
    zero: float, dtype: torch.dtype, scheme: str
) -> None:
    x = numbers((3, 96), dtype, spread=1.0)
    x[1], x[:, 80:] = zero, zero
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
    found = zp.quantize(x, scheme)
    assert torch.equal(found.data, expected.data)
    assert found.params == expected.params


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    x = numbers((4, 256), torch.float32)
    x[2, 5] = value
    with pytest.raises(zp.NonFiniteError, match=r"\(2, 5\)"):
        zp.quantize(x, "mx9")


def test_codes_go_to_the_memory_that_is_given() -> None:
    x = numbers((4, 256), torch.float32)
    expected, out = zp.quantize(x, "mx6"), zp.quantize(-x, "mx6")
    zp.quantize(x, "mx6", out=out)
    assert torch.equal(out.data, expected.data)
    assert out.params == expected.params
