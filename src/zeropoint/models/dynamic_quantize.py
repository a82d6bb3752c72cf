"""DynamicQuantize: quantization whose parameters come from each tensor."""

from __future__ import annotations

import torch
from torch import nn

from ..functional import fake_quantize
from ..recipes import Activation
from ..training import FakeQuantize


class DynamicQuantize(nn.Module):
    """Quantize and bring back with parameters computed from each tensor."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the codes of ``x``; nothing happens to an empty tensor."""
        return fake_quantize(x, self.activation.scheme) if x.numel() else x

    def extra_repr(self) -> str:
        """Return the scheme."""
        return str(self.activation)


def as_module(quantizer: FakeQuantize | Activation | None) -> nn.Module | None:
    """Return what quantizes: a quantizer with parameters is itself.

    >>> as_module(Activation.of("int8:token"))
    DynamicQuantize(int8:token dynamic)
    """
    return DynamicQuantize(quantizer) if isinstance(quantizer, Activation) else quantizer
