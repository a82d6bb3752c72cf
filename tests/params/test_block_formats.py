"""MX9, MX6, MX4, BFP16 and NVFP4 against plain NumPy programs of their definitions."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.params import arithmetic

Array = np.ndarray
MICRO = {"mx9": 7, "mx6": 4, "mx4": 2}


def sample(rows: int, columns: int, seed: int, spread: float) -> Array:
    """Return float32 rows of numbers that differ by up to ``2 ** spread`` in magnitude, some zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * np.exp2(rng.uniform(-spread, spread, (rows, columns)))
    x[rng.random((rows, columns)) < 0.05] = 0
    x[rng.random((rows, columns)) < 0.05] *= -0.0
    return x.astype(np.float32)


def exponents(x: Array) -> Array:
    """Return floor(log2|x|) from the bits, at least -127, which is that of zero."""
    return np.maximum(np.where(x == 0, -127, np.frexp(x.astype(np.float64))[1] - 1), -127)


def microexponents(row: Array, m: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return shared exponent bytes, microexponents, sign-magnitude codes and values of one row.

    E is the largest exponent of 16 elements, tau says that both elements of a pair have a smaller one,
    value = q * 2 ** (E - tau - (m - 1)), q = clamp(round_half_even(x / step)). Exponents below
    -127, where the shared byte ends, count as -127, so that a block of zeros has no bit set.
    """
    shared, micro, codes, values = [], [], [], []
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        top = int(exponents(block).max())
        shared.append(top + 127)
        for pair in (block[i : i + 2] for i in range(0, len(block), 2)):
            tau = int(exponents(pair).max() < top)
            micro.append(tau)
            step = math.ldexp(1.0, top - tau - (m - 1))
            for number in pair.astype(np.float64):
                steps = min(int(np.rint(abs(number) / step)), 2**m - 1)
                codes.append(steps | (int(np.signbit(number)) << m))
                values.append(math.copysign(steps * step, number))
    return shared, micro, codes, values


@pytest.mark.crossed
@pytest.mark.parametrize("preset", MICRO)
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 31, 64, 101])
@pytest.mark.parametrize("spread", [0.0, 2.0, 30.0, 110.0])
def test_shared_microexponents_follow_their_definition(preset: str, columns: int, spread: float) -> None:
    x = sample(20, columns, seed=columns, spread=spread)
    q = zp.quantize(torch.from_numpy(x), preset)
    for row in range(len(x)):
        shared, micro, codes, values = microexponents(x[row], MICRO[preset])
        assert q.scales[1].view(torch.uint8)[row].tolist() == shared
        assert q.scales[0][row].tolist() == micro
        assert q.codes[row].tolist() == codes
        assert q.dequantize(torch.float64)[row].tolist() == values


@pytest.mark.parametrize(
    ("pair", "tau"), [((1.0, -0.9), 0), ((-0.9, 0.75), 1), ((0.5, -0.25), 1), ((0.0, 0.0), 1)]
)
def test_a_pair_is_halved_when_both_exponents_lie_below_the_shared_one(
    pair: tuple[float, float], tau: int
) -> None:
    """Signs do not matter, and a pair with one large element is not halved."""
    x = torch.tensor([[1.5, 0.0, *pair, *[0.0] * 12]])
    q = zp.quantize(x, "mx9")
    assert int(q.scales[0][0, 1]) == tau


def test_a_value_just_below_the_next_power_is_clamped_to_the_largest_mantissa() -> None:
    below = np.nextafter(np.float32(2), np.float32(0))
    q = zp.quantize(torch.tensor([[float(below), -float(below)]]), "mx6")
    assert q.codes.tolist() == [[15, 31]]
    assert q.dequantize().tolist() == [[1.875, -1.875]]


@pytest.mark.parametrize("preset", MICRO)
def test_a_zero_block_has_the_least_shared_exponent_and_zero_mantissas(preset: str) -> None:
    q = zp.quantize(torch.zeros(1, 16), preset)
    assert q.scales[1].view(torch.uint8).tolist() == [[0]]
    assert not q.codes.any()


# Signal to noise ratios that arXiv:2302.08007 and AMD Quark give for normal data.
@pytest.mark.parametrize(("preset", "decibels"), [("mx9", 46.5), ("mx6", 28.3), ("mx4", 15.7)])
def test_normal_data_has_the_published_signal_to_noise_ratio(preset: str, decibels: float) -> None:
    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    error = (zp.quantize(x, preset).dequantize() - x).double()
    ratio = 10 * math.log10(float(x.double().pow(2).mean() / error.pow(2).mean()))
    assert abs(ratio - decibels) < 0.1  # the sources give one decimal


def test_block_floating_point_doubles_the_step_when_a_mantissa_would_overflow() -> None:
    """BFP16: eight 8-bit mantissas under one exponent, which grows when the largest rounds to 128."""
    x = sample(200, 24, seed=3, spread=3.0)
    x[0, :8] = [127.49999, 1, 2, 3, 4, 5, 6, 7]
    x[1, :8] = [127.5, 1, 2, 3, 4, 5, 6, 7]
    q = zp.quantize(torch.from_numpy(x), "bfp16")
    for row in range(len(x)):
        for start in range(0, 24, 8):
            block = x[row, start : start + 8].astype(np.float64)
            exponent = int(exponents(block).max()) - 6
            if not block.any():
                continue
            if np.abs(np.rint(block * 2.0**-exponent)).max() >= 128:
                exponent += 1
            wanted = np.rint(block * 2.0**-exponent)
            assert q.codes[row, start : start + 8].tolist() == wanted.astype(int).tolist()
            assert int(q.scales[0].view(torch.uint8)[row, start // 8]) == exponent + 6 + 127


def nvfp4(x: Array) -> tuple[np.float32, Array, Array]:
    """Return the tensor scale, the bytes of the block scales and the codes, each step rounded to float32.

    s_global = amax / (448 * 6), s_block = e4m3((amax_block / 6) / s_global),
    q = e2m1(x / (s_block * s_global)).
    """
    f32 = np.float32
    amax = np.abs(x).max()
    whole = f32(1) if amax == 0 else np.maximum(amax / f32(2688), f32(2.0**-126))
    blocks = np.abs(np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))).reshape(len(x), -1, 16).max(-1)
    fine = np.clip((blocks / f32(6)) / whole, 0, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = np.repeat(fine.astype(f32) * whole, 16, axis=1)[:, : x.shape[1]]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scale == 0, np.copysign(f32(0), x), x / scale)
    return whole, fine.view(np.uint8), np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


@pytest.mark.crossed
@pytest.mark.parametrize("columns", [1, 15, 16, 33, 128])
@pytest.mark.parametrize("spread", [0.0, 4.0, 20.0, 60.0])
@pytest.mark.parametrize("factor", [1.0, 2.0**-118, 2.0**60])
def test_nvfp4_follows_its_definition(columns: int, spread: float, factor: float) -> None:
    x = sample(16, columns, seed=columns, spread=spread) * np.float32(factor)
    whole, fine, codes = nvfp4(x)
    q = zp.quantize(torch.from_numpy(x), "nvfp4:dialect=zeropoint")
    assert q.scales[1].item() == whole
    assert q.scales[0].view(torch.uint8).tolist() == fine.tolist()
    assert q.codes.tolist() == codes.tolist()


def test_an_nvfp4_tensor_of_zeros_has_tensor_scale_one_and_zero_bytes() -> None:
    """torchao makes NaN of it."""
    q = zp.quantize(torch.zeros(2, 32), "nvfp4:dialect=zeropoint")
    assert q.scales[1].item() == 1.0
    assert not q.scales[0].view(torch.uint8).any()
    assert not q.codes.any()
    assert torch.equal(q.dequantize(), torch.zeros(2, 32))


def test_a_zero_block_of_nvfp4_keeps_a_zero_scale_among_others() -> None:
    x = torch.cat([torch.zeros(1, 16), torch.ones(1, 16)], -1)
    q = zp.quantize(x, "nvfp4:dialect=zeropoint")
    assert q.scales[0].view(torch.uint8).tolist() == [[0, 0x7E]]
    assert torch.equal(q.dequantize()[0, :16], torch.zeros(16))


@pytest.mark.parametrize("amax", [2.0**-149, 1e-44, 1e-40, 2.0**-126, 1e-36, 3e-35])
def test_a_tiny_nvfp4_tensor_stays_finite_and_within_its_bound(amax: float) -> None:
    x = torch.linspace(-1, 1, 32).mul(amax).reshape(1, 32)
    q = zp.quantize(x, "nvfp4:dialect=zeropoint")
    assert float(q.scales[1]) >= 2.0**-126
    values = q.dequantize()
    assert torch.isfinite(values).all()
    bound = q.error_bound().repeat_interleave(16, -1)
    assert ((values.double() - x.double()).abs() <= bound).all()


def test_a_block_far_below_the_tensor_becomes_zeros_and_says_so_in_its_scale() -> None:
    """One outlier of 1e30 among ones."""
    x = torch.ones(1, 32)
    x[0, 0] = 1e30
    q = zp.quantize(x, "nvfp4:dialect=zeropoint")
    assert q.scales[0].view(torch.uint8).tolist() == [[0x7E, 0]]
    assert torch.equal(q.dequantize()[0, 16:], torch.zeros(16))
    assert bool((q.error_bound()[0, 1] >= 1.0).all())


@pytest.mark.parametrize(
    ("scheme", "dtype", "unchecked"),
    [
        ("nvfp4:dialect=zeropoint", torch.float32, True),
        ("nvfp4:dialect=zeropoint", torch.bfloat16, True),
        ("int8:g16:scale=ue5m3:scale2=float32@tensor", torch.float16, True),
        ("nvfp4:dialect=torch", torch.float32, True),
        ("nvfp4:dialect=zeropoint", torch.float64, False),
        ("nvfp4:dialect=compressed-tensors", torch.float32, False),
        ("float4_e2m1fn:g16:scale=ue4m3:scale2=bfloat16@tensor", torch.float32, False),
        ("float4_e2m1fn:g16:scale=float16:scale2=float32@tensor", torch.float32, False),
        ("codebook[-0.1,0,0.1]:g16:scale=ue4m3:scale2=float32@tensor", torch.float32, False),
    ],
)
def test_a_tensor_scale_that_needs_no_check_is_the_one_that_passes_it(
    scheme: str, dtype: torch.dtype, unchecked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, limits = zp.Scheme.parse(scheme), torch.finfo(dtype)
    assert arithmetic._always_fits(parsed, dtype) is unchecked
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    powers = [2.0**n for n in range(-149, 128, 3) if limits.tiny * limits.eps <= 2.0**n <= limits.max]
    found: list[list[torch.Tensor | None]] = [[], []]
    for mantissa in (1.0, 1.0 + limits.eps, 1.7, 2.0 - limits.eps):
        for amax in (torch.tensor([[mantissa * power]], dtype=dtype).to(wide) for power in powers):
            ranges = arithmetic.Ranges(minimum=(amax, amax), maximum=(amax, amax), dtype=dtype, shape=(1, 16))
            for outcomes, fast in zip(found, (True, False), strict=True):
                with monkeypatch.context() as patch:
                    if not fast:
                        patch.setattr(arithmetic, "_always_fits", lambda *_: False)
                    try:
                        outcomes.append(arithmetic.coarsest_scale(parsed, ranges))
                    except zp.RangeError:
                        outcomes.append(None)
    assert len(found[0]) > 50
    for fast_one, checked in zip(*found, strict=True):
        assert (fast_one is None) == (checked is None)
        assert fast_one is None or checked is None or torch.equal(fast_one, checked)
