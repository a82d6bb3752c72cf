"""bitsandbytes' nf4 with compress_statistics, by its formulas (functional.py, 0.50), typed again in torch.

Codes come from absmax itself; absmax less its mean is then stored through the 8-bit dynamic map, in blocks of
256. Against the package, on normal weights: all codes and float32 factors within an ulp are the same, and so
is all but 2 of 700 stored absmax, because the mean is exact here and summed in float32 there.
"""

from __future__ import annotations

import torch

import zeropoint as zp
from zeropoint.formats import get_format


def dynamic_map() -> torch.Tensor:
    """Return create_dynamic_map() of bitsandbytes."""
    data = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        middles = (ends[:-1] + ends[1:]) / 2.0
        data += (10 ** (-6 + i) * middles).tolist() + (-(10 ** (-6 + i)) * middles).tolist()
    return torch.tensor(sorted(data), dtype=torch.float32)


def test_the_dynamic_map_is_that_of_bitsandbytes() -> None:
    fmt = get_format("dynamic8")
    assert fmt.code_count == 256
    assert list(fmt.values) == dynamic_map().tolist()  # type: ignore[union-attr]


def test_codes_and_absmax_follow_the_formulas_of_bitsandbytes() -> None:
    x = torch.randn(64 * 256 * 3, generator=torch.Generator().manual_seed(0)) * 0.02
    q = zp.quantize(x, "nf4_double")
    absmax = x.reshape(-1, 64).abs().amax(1)
    nf4 = torch.tensor(get_format("nf4").values)  # type: ignore[union-attr]
    ratios = (x.reshape(-1, 64) / absmax[:, None]).double()
    distance = (ratios[:, :, None] - nf4.double()).abs()
    assert torch.equal(q.codes.reshape(-1, 64).long(), distance.argmin(2))
    assert q.params.center is not None
    assert float(q.params.center) == float(absmax.double().mean().float())
    centered = (absmax - q.params.center).reshape(-1, 256)
    coarse = centered.abs().amax(1)
    assert torch.equal(q.params.scales[1], coarse)
    distance = ((centered / coarse[:, None]).double()[:, :, None] - dynamic_map().double()).abs()
    assert torch.equal(q.params.scales[0].reshape(-1, 256).long(), distance.argmin(2))
    decoded = dynamic_map()[distance.argmin(2)] * coarse[:, None] + q.params.center
    assert torch.equal(
        q.dequantize(), (nf4[q.codes.long()].reshape(-1, 64) * decoded.reshape(-1, 1)).flatten()
    )


def test_double_quantization_saves_three_eighths_of_a_bit() -> None:
    plain, double = (zp.Scheme.parse(name).bits_per_value((64, 1 << 16)) for name in ("nf4", "nf4_double"))
    assert plain == 4.5
    assert abs(double - (4 + 8 / 64 + 32 / (1 << 14))) < 1e-4
