"""ggml's block formats against the gguf package: what it decodes, what it encodes, what a value costs.

gguf computes in float32 as we do: ``d * q``, ``d * q + m`` and ``(d * sc) * q - dmin * m``, one rounding an
operation in that order. Its K-quants are decoded only; ours are rounded to nearest, without a search.
"""

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType

import zeropoint as zp
from zeropoint.codecs.gguf import BLOCKS

BITS = {
    "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0,
    "q2_k": 2.625, "q3_k": 3.4375, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625,
    "iq4_nl": 4.5, "iq4_xs": 4.25, "tq1_0": 1.6875, "tq2_0": 2.0625,
}  # fmt: skip
ENCODED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


def packed(q: zp.QuantizedTensor, name: str) -> npt.NDArray[np.uint8]:
    return BLOCKS[name.upper()].encode(q).numpy()


def tensors() -> list[torch.Tensor]:
    """Return matrices of whole super-blocks: normal, shifted, of one sign, with zeros, ties and outliers."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(16, 1024, generator=generator)
    ties = torch.randint(-40, 41, x.shape, generator=generator) / 8
    rows = x * torch.exp2(torch.randint(-20, 12, (16, 1), generator=generator).float())
    quiet = torch.where(torch.arange(1024) >= 300, x, 0.0)
    return [x, x + 3, x.abs(), -x.abs(), ties, rows, quiet, torch.zeros(2, 512), torch.full((1, 256), -2.5)]


@pytest.mark.parametrize("name", BITS)
def test_gguf_decodes_our_codes_to_our_values(name: str) -> None:
    kind = GGMLQuantizationType[name.upper()]
    for x in tensors():
        q = zp.quantize(x, name)
        expected = gguf.dequantize(packed(q, name), kind).reshape(x.shape)
        assert torch.equal(q.dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("name", ENCODED)
def test_codes_and_scales_are_those_that_gguf_writes(name: str) -> None:
    kind = GGMLQuantizationType[name.upper()]
    for x in tensors():
        expected = gguf.quantize(x.numpy(), kind)
        assert np.array_equal(packed(zp.quantize(x, name), name).reshape(expected.shape), expected)


@pytest.mark.parametrize("name", BITS)
def test_a_value_costs_what_it_costs_in_ggml(name: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    x = torch.randn(2, 512)
    assert zp.Scheme.parse(name).bits_per_value((2, 512)) == 8 * size / block == BITS[name]
    assert zp.quantize(x, name).nbytes == x.numel() // block * size


@pytest.mark.parametrize("name", BITS)
def test_no_error_is_past_its_bound(name: str) -> None:
    for x in tensors():
        q = zp.quantize(x, name)
        bound = q.error_bound().repeat_interleave(q.scheme.granularity.extents[0], -1)
        error = (q.dequantize().double() - x.double()).abs()
        assert bool((error <= bound).all())
        assert torch.equal(zp.fake_quantize(x, name), q.dequantize())
