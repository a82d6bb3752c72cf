"""DynamicQuantize: quantization whose parameters come from each tensor."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import RecipeError
from ..functional import fake_quantize
from ..recipes import Activation
from ..training import FakeQuantize


class DynamicQuantize(nn.Module):
    """Quantize and bring back with parameters computed from each tensor.

    Raises RecipeError for what is no Activation, such as its text.
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        if not isinstance(activation, Activation):
            raise RecipeError(
                f"activation (={activation!r}) must be an Activation; write Activation.of('int8:token')"
            )
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the codes of ``x``; nothing happens to an empty tensor."""
        return fake_quantize(x, self.activation.scheme) if x.numel() else x

    def extra_repr(self) -> str:
        """Return the scheme."""
        return str(self.activation)


def as_module(quantizer: FakeQuantize | Activation | None) -> nn.Module | None:
    """Return what quantizes: a quantizer with parameters is itself. Raises RecipeError for anything else.

    >>> as_module(Activation.of("int8:token"))
    DynamicQuantize(int8:token dynamic)
    """
    return quantizer if quantizer is None or isinstance(quantizer, nn.Module) else DynamicQuantize(quantizer)
