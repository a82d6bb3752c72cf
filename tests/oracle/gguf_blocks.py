"""Codes and levels of a quantized tensor as GGUF blocks: the wire format of ggml, written down once more.

Bytes are those of ``ggml-common.h``: of each block, or super-block of 256, in the order of its struct.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

import zeropoint as zp

Bytes = npt.NDArray[np.uint8]


def codes_of(q: zp.QuantizedTensor, block: int) -> Bytes:
    """Return codes as a row a block, signed ones moved up to start at 0."""
    codes = q.codes.reshape(-1, block).to(torch.int64)
    element = q.scheme.element
    return (codes - (element.qmin if element.signed else 0)).numpy().astype(np.uint8)


def half(levels: torch.Tensor) -> Bytes:
    """Return float16 numbers, one a block, as two bytes each."""
    return levels.reshape(-1, 1).contiguous().numpy().view(np.uint8)


def small(levels: torch.Tensor, count: int, bits: int = 8) -> Bytes:
    """Return the codes of integer levels, ``count`` a block, as unsigned numbers of ``bits``."""
    return levels.view(torch.uint8).reshape(-1, count).numpy() & ((1 << bits) - 1)


def nibbles(codes: Bytes, size: int) -> Bytes:
    """Return 4-bit codes in runs of ``2 * size``: byte j of a run holds elements j and j + size."""
    runs = (codes & 15).reshape(len(codes), -1, 2, size)
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).reshape(len(codes), -1)


def high_bits(codes: Bytes) -> Bytes:
    """Return bit 4 of 32 codes as a little-endian uint32."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def pairs(codes: Bytes) -> Bytes:
    """Return 2-bit codes in runs of 128: bits 2s of byte j hold element 32 s + j."""
    runs = (codes & 3).reshape(len(codes), -1, 4, 32)
    return sum(runs[:, :, s] << (2 * s) for s in range(4)).astype(np.uint8).reshape(len(codes), -1)


def sixes(scales: Bytes, minima: Bytes) -> Bytes:
    """Return eight 6-bit scales and minima in twelve bytes, as get_scale_min_k4 reads them."""
    low = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    middle = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    return np.concatenate([low, middle, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], axis=1)


def packed(q: zp.QuantizedTensor, name: str) -> Bytes:
    """Return the blocks of ``q`` under the preset ``name``, one row each."""
    size = 256 if name.endswith("k") else 32
    codes = codes_of(q, size)
    d, *_ = [half(level) for level in q.params.scales[-1:]]
    minimum = [half(level) for level in q.params.offsets[-1:]]
    if name == "q8_0":
        return np.concatenate([d, codes ^ 0x80], axis=1)
    if name in ("q4_0", "q4_1"):
        return np.concatenate([d, *minimum, nibbles(codes, 16)], axis=1)
    if name in ("q5_0", "q5_1"):
        return np.concatenate([d, *minimum, high_bits(codes), nibbles(codes, 16)], axis=1)
    return _K[name](q, codes, d)


def _negated(q: zp.QuantizedTensor) -> Bytes:
    """Return the factor of minima: the coarse offset, which ggml keeps as what is subtracted."""
    return half(-q.params.offsets[1])


def _q2_k(q: zp.QuantizedTensor, codes: Bytes, d: Bytes) -> Bytes:
    both = small(q.params.scales[0], 16) | (small(q.params.offsets[0], 16) << 4)
    return np.concatenate([both, pairs(codes), d, _negated(q)], axis=1)


def _q3_k(q: zp.QuantizedTensor, codes: Bytes, d: Bytes) -> Bytes:
    mask = np.packbits((codes >> 2).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(len(codes), 32)
    scales = (small(q.params.scales[0], 16, 6) + 32) & 63
    low = (scales[:, :8] & 15) | ((scales[:, 8:] & 15) << 4)
    parts = (scales >> 4).reshape(-1, 4, 4)
    high = sum(parts[:, m] << (2 * m) for m in range(4)).astype(np.uint8)
    return np.concatenate([mask, pairs(codes), low, high, d], axis=1)


def _q4_k(q: zp.QuantizedTensor, codes: Bytes, d: Bytes) -> Bytes:
    return np.concatenate([d, _negated(q), _scales_and_minima(q), nibbles(codes, 32)], axis=1)


def _q5_k(q: zp.QuantizedTensor, codes: Bytes, d: Bytes) -> Bytes:
    high = np.packbits((codes >> 4).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(len(codes), 32)
    return np.concatenate([d, _negated(q), _scales_and_minima(q), high, nibbles(codes, 32)], axis=1)


def _q6_k(q: zp.QuantizedTensor, codes: Bytes, d: Bytes) -> Bytes:
    return np.concatenate([nibbles(codes, 64), pairs(codes >> 4), small(q.params.scales[0], 16), d], axis=1)


def _scales_and_minima(q: zp.QuantizedTensor) -> Bytes:
    return sixes(small(q.params.scales[0], 8), small(q.params.offsets[0], 8))


_K = {"q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}
