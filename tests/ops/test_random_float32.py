"""float32 to 8, 6 and 4 bits against ml_dtypes and torch: two million at random, and (slow) every number.

Saturation is stated: our codes saturate, also at Inf; ml_dtypes and torch overflow to NaN or Inf in some
formats, so their input is clamped to the largest finite value first, which no rounding can pass.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint import only_backend
from zeropoint.formats import CATALOG, RoundingMode
from zeropoint.formats.codes import encode

FINITE = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float6_e3m2fn": ml_dtypes.float6_e3m2fn,
    "float6_e2m3fn": ml_dtypes.float6_e2m3fn,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}
TORCH = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
CHUNK = 1 << 20
QUICK_CHUNKS, SLOW_CHUNKS = 1, 16


def random_bits(seed: int) -> torch.Tensor:
    """Return float32 of random bits: every exponent, subnormals, Inf and NaN occur."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (CHUNK,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def near_codes(seed: int, name: str) -> torch.Tensor:
    """Return float32 in the range of the format and a little past it, where codes are dense."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(CHUNK, generator=generator) * 24 - 20
    sign = torch.randint(0, 2, (CHUNK,), generator=generator) * 2 - 1
    return torch.exp2(exponent) * float(CATALOG[name].max) * sign


def clamped(x: torch.Tensor, name: str) -> torch.Tensor:
    top = float(CATALOG[name].max)
    return x.clamp(-top, top)


def from_ml_dtypes(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.from_numpy(clamped(x, name).numpy().astype(FINITE[name]).view(np.uint8))


def from_torch(x: torch.Tensor, name: str) -> torch.Tensor:
    return clamped(x, name).to(TORCH[name]).view(torch.uint8)


def disagreements(x: torch.Tensor, name: str, oracle: Callable[[torch.Tensor, str], torch.Tensor]) -> int:
    """Return how many numbers of ``x``, NaN apart, have another code than the oracle's."""
    numbers = x[~torch.isnan(x)]
    codes = encode(numbers, CATALOG[name], RoundingMode.HALF_EVEN)
    return int((codes != oracle(numbers, name)).sum())


CASES = [(name, from_ml_dtypes) for name in FINITE] + [(name, from_torch) for name in TORCH]


@pytest.mark.parametrize("chunks", [QUICK_CHUNKS, pytest.param(SLOW_CHUNKS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FINITE)
def test_random_float32_have_the_codes_of_ml_dtypes(name: str, chunks: int) -> None:
    for n in range(chunks):
        assert disagreements(random_bits(100 + n), name, from_ml_dtypes) == 0
        assert disagreements(near_codes(200 + n, name), name, from_ml_dtypes) == 0


@pytest.mark.parametrize("name", TORCH)
def test_random_float32_have_the_codes_of_torch(name: str) -> None:
    assert disagreements(random_bits(11), name, from_torch) == 0
    assert disagreements(near_codes(12, name), name, from_torch) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "oracle"), CASES)
def test_every_float32_has_the_code_of_the_oracle(
    name: str, oracle: Callable[[torch.Tensor, str], torch.Tensor]
) -> None:
    """All 2**32, on the kernels of the cpu backend: the reference would take hours."""
    wrong = 0
    with only_backend("cpu"):
        for start in range(-(1 << 31), 1 << 31, 1 << 22):
            x = torch.arange(start, start + (1 << 22), dtype=torch.int64).to(torch.int32).view(torch.float32)
            x = x[torch.isfinite(x)]
            wrong += int((zp.quantize(x, f"{name}:cast").codes != oracle(x, name)).sum())
    assert wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FINITE)
def test_every_257th_float32_has_the_code_of_the_oracle_in_the_reference(name: str) -> None:
    """An odd stride, so that every exponent and every pattern of low bits occurs: 2**24 numbers."""
    wrong = 0
    for start in range(-(1 << 31), 1 << 31, CHUNK * 257):
        codes = torch.arange(start, min(start + CHUNK * 257, 1 << 31), 257, dtype=torch.int64)
        wrong += disagreements(codes.to(torch.int32).view(torch.float32), name, from_ml_dtypes)
    assert wrong == 0


@pytest.mark.parametrize("name", FINITE)
def test_infinity_saturates_to_the_largest_code(name: str) -> None:
    fmt = CATALOG[name]
    codes = encode(torch.tensor([np.inf, -np.inf]), fmt, RoundingMode.HALF_EVEN)
    assert codes.tolist() == [fmt.max_code, fmt.max_code | (1 << (fmt.bits - 1))]


def test_the_oracles_do_overflow_so_the_clamp_is_needed() -> None:
    past = np.float32(1e6)
    assert np.isnan(np.asarray(past).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert torch.isinf(torch.tensor(past).to(torch.float8_e5m2).float())


@pytest.mark.crossed
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("signed", [True, False])
def test_random_float32_have_the_codes_of_rounding_and_clamping(bits: int, signed: bool) -> None:
    fmt = CATALOG[f"{'' if signed else 'u'}int{bits}"]
    x = torch.cat([random_bits(13), near_codes(14, f"uint{bits}")])
    x = x[~torch.isnan(x)]
    wanted = np.clip(np.rint(x.double().numpy()), fmt.qmin, fmt.qmax).astype(np.int64) % (1 << bits)
    assert np.array_equal(encode(x, fmt, RoundingMode.HALF_EVEN).numpy(), wanted)


def test_random_float32_have_the_nf4_codes_of_bitsandbytes_thresholds() -> None:
    # The decision thresholds of bitsandbytes' quantize_nf4, written out in its sources.
    thresholds = np.array(
        [
            -0.8480963706970215, -0.6106328964233398, -0.4599952697753906, -0.33967941999435425,
            -0.23460739850997925, -0.13791173696517944, -0.045525018125772476, 0.03979014977812767,
            0.120255246758461, 0.2035212516784668, 0.2920137643814087, 0.3893125355243683,
            0.5016634464263916, 0.6427869200706482, 0.8614784479141235,
        ],
        dtype=np.float32,
    )  # fmt: skip
    x = (torch.rand(CHUNK, generator=torch.Generator().manual_seed(15)) * 2.2 - 1.1).numpy()
    x = np.concatenate(
        [x, thresholds, np.nextafter(thresholds, np.float32(2)), np.nextafter(thresholds, np.float32(-2))]
    )
    wanted = (x[:, None] > thresholds).sum(-1)
    codes = encode(torch.from_numpy(x), CATALOG["nf4"], RoundingMode.HALF_EVEN)
    assert np.array_equal(codes.numpy(), wanted)
