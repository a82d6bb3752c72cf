"""bitsandbytes' nf4 with compress_statistics, by its formulas (functional.py, 0.50), typed again in torch.

Codes come from absmax itself; absmax less its mean is then stored through the 8-bit dynamic map, in blocks of
256. Against the package, on normal weights: all codes and float32 factors within an ulp are the same, and so
is all but 2 of 700 stored absmax, because the mean is exact here and summed in float32 there.
"""

from pathlib import Path

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


def test_scales_and_minima_in_8_bits_follow_their_definition(tmp_path: Path) -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.005
    q = zp.quantize(x, "uint4_double")
    blocks = x.reshape(6, 3, 32).double()
    low = blocks.amin(2).clamp(max=0)
    step, least = (blocks.amax(2).clamp(min=0) - low) / 15, -low
    coarse, floor = (
        found.amax(1, keepdim=True).div(255).to(torch.float32).to(torch.float16).double()
        for found in (step, least)
    )
    scales, minima = (step / coarse).round().clamp(0, 255), (least / floor).round().clamp(0, 255)
    assert torch.equal(q.scales[0].double(), scales)
    assert torch.equal(q.scales[1].double(), coarse)
    wide = (scales * coarse)[..., None]
    codes = ((blocks + (minima * floor)[..., None]) / wide).round().clamp(0, 15)
    # A quotient half-way between two codes may fall to the other in float32.
    assert int((codes.reshape(6, 96) != q.codes.double()).sum()) == 0
    decoded = codes * wide - (minima * floor)[..., None]
    assert torch.allclose(q.dequantize().double(), decoded.reshape(6, 96), rtol=1e-6, atol=1e-8)
    off = (q.dequantize().double() - x.double()).abs().reshape(6, 3, 32).amax(2)
    assert bool((off <= q.error_bound()).all())
    assert torch.equal(zp.fake_quantize(x, "uint4_double"), q.dequantize())
    q.save(tmp_path / "q.safetensors")
    assert torch.equal(zp.QuantizedTensor.load(tmp_path / "q.safetensors").dequantize(), q.dequantize())
    assert q.scheme.bits_per_value((64, 4096)) == 4 + 16 / 32 + 32 / 4096
