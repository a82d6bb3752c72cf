"""Random tensors of a seed, and tensors compared byte for byte."""

import torch

import zeropoint as zp
from zeropoint.codecs.protocol import LayerScheme


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers, drawn in float32 but for float64."""
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=drawn).to(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare dtype, shape and every byte."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def encoded(layer: LayerScheme, q: zp.QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return all tensors of a weight in the layout of its codec."""
    return layer.codec.encode(layer, q) | layer.codec.constants(layer, q.params, q.shape)
