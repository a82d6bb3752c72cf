"""Zero points under several levels, and powers of two within chains, against scalars of NumPy float32."""

import math

import numpy as np
import pytest
import torch

import zeropoint as zp

F32 = np.float32


def blocks_of(x: np.ndarray, size: int) -> list[np.ndarray]:
    return [x[start : start + size] for start in range(0, len(x), size)]


def affine_by_hand(
    x: np.ndarray, steps: int, low_code: int, group: int, whole: int
) -> tuple[list[float], ...]:
    """Return sub-scales of 6 bits, float16 scales, zero points and values, one operation after the other."""
    fine: list[float] = []
    coarse: list[float] = []
    zeros: list[float] = []
    values: list[float] = []
    for part in blocks_of(x, whole):
        ranges = [(min(b.min(), F32(0)), max(b.max(), F32(0))) for b in blocks_of(part, group)]
        ideal = [F32(float(F32(high - low)) / steps) for low, high in ranges]
        d = np.float16(F32(float(max(ideal)) / 63))
        coarse.append(float(d))
        for block, (low, _), scale in zip(blocks_of(part, group), ranges, ideal, strict=True):
            code = min(63, round(float(F32(scale / F32(d)))))
            fine.append(code)
            s = F32(F32(code) * F32(d))
            zero = low_code if s == 0 else round(float(F32(F32(low_code) - F32(low / s))))
            zero = min(max(zero, low_code), low_code + steps)
            zeros.append(zero)
            for value in block:
                step = 0 if s == 0 else round(float(F32(value / s)))
                q = min(max(step + zero, low_code), low_code + steps)
                values.append(float(F32(F32(q - zero) * s)))
    return fine, coarse, zeros, values


@pytest.mark.parametrize(("element", "steps", "low"), [("uint4", 15, 0), ("int4", 15, -8), ("uint3", 7, 0)])
def test_zero_points_under_six_bit_scales_are_those_of_scalar_arithmetic(
    element: str, steps: int, low: int
) -> None:
    stream = np.random.RandomState(5)
    x = (stream.standard_normal(1024) * 2.0 ** stream.randint(-5, 5, 32).repeat(32)).astype(F32)
    x[:32], x[64:96], x[96:128] = 0.0, np.abs(x[64:96]), -np.abs(x[96:128])
    q = zp.quantize(torch.from_numpy(x), f"{element}:g32:asym:scale=uint6:scale2=float16@g256")
    assert q.zero_point is not None
    fine, coarse, zeros, values = affine_by_hand(x, steps, low, 32, 256)
    assert q.scales[0].tolist() == fine
    assert q.scales[1].tolist() == coarse
    # Where a scale was lost, the zero point is the code of zero, or that nearest to it.
    assert q.zero_point.tolist() == [z if f else max(low, 0) for z, f in zip(zeros, fine, strict=True)]
    assert q.dequantize().tolist() == values


@pytest.mark.parametrize(
    ("rule", "exponent"),
    [
        ("floor", lambda n: math.floor(math.log2(n))),
        ("ceil", lambda n: math.ceil(math.log2(n))),
        ("rceil", lambda n: math.ceil(math.log2(n))),
        ("even", lambda n: math.floor(math.log2(n)) + (n / 2 ** math.floor(math.log2(n)) >= 1.5)),
    ],
)
def test_a_power_of_two_above_integers_is_that_of_the_largest_over_their_largest(
    rule: str, exponent: object
) -> None:
    assert callable(exponent)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 8)[:, None]
    q = zp.quantize(x, f"int4:g32:scale=uint6:scale2={rule}@g256")
    for row in range(8):
        largest = float(F32(x[row].abs().max().item() / 7.5)) / 63
        assert int(q.scales[1].view(torch.uint8)[row, 0]) - 127 == exponent(largest)
    assert bool(((q.dequantize() - x).abs() <= q.error_bound().repeat_interleave(32, 1)).all())


@pytest.mark.parametrize(("element", "emax", "divisor"), [("uint8", 7, 255.0), ("int8", 6, 127.5)])
def test_a_power_of_two_under_a_zero_point_is_that_of_the_width(
    element: str, emax: int, divisor: float
) -> None:
    x = torch.tensor([[-1.0, 5.0, 2.0], [0.25, 0.75, 0.5], [-100.0, -3.0, 0.0]])
    q = zp.quantize(x, f"{element}:token:asym:scale=rceil")
    widths = [6.0, 0.75, 100.0]
    for row, width in enumerate(widths):
        reach = width * divisor / 255
        wanted = math.ceil(math.log2(reach / divisor))
        assert int(q.scales[0].view(torch.uint8)[row, 0]) - 127 == wanted
        assert 2.0**wanted * 255 >= width > 2.0 ** (wanted - 1) * 255
    assert float((q.dequantize() - x).abs().max()) <= float(q.error_bound().max())
    assert emax == q.scheme.element.emax


def test_chained_zero_points_train_save_and_say_why_kernels_refuse_them(tmp_path: object) -> None:
    text = "uint4:g32:asym:scale=uint6:scale2=float16@g256"
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    q = zp.quantize(x, text)
    assert torch.equal(zp.fake_quantize(x, q.params), q.dequantize())
    assert q.bits_per_value == zp.Scheme.parse(text).bits_per_value((4, 256)) == 4 + (6 + 4) / 32 + 16 / 256
    reasons = zp.explain(x, text, op="quantize")
    assert reasons.chosen == "reference"
    assert "scales of level uint6@g32 are known to the reference alone" in str(reasons)
