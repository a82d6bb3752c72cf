"""Modules for torch functions of several tensors, for recipe rules."""

from __future__ import annotations

import torch
from torch import nn


class Add(nn.Module):
    """``a + b``, whose terms share a quantizer under rules for ``Add``.

    Example:
        >>> Add()(torch.ones(2), torch.ones(2))
        tensor([2., 2.])
    """

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the sum.

        Args:
            a: the first term.
            b: the second term.
        """
        return a + b


class Multiply(nn.Module):
    """``a * b``, whose factors share a quantizer under rules for ``Multiply``."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the product.

        Args:
            a: the first factor.
            b: the second factor.
        """
        return a * b


class Concatenate(nn.Module):
    """``torch.cat`` as a module; rules for ``Concatenate`` quantize parts alike.

    Args:
        dim: the axis along which they are joined.
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        """Return the parts joined.

        Args:
            parts: tensors that agree in all axes but ``dim``.
        """
        return torch.cat(parts, self.dim)

    def extra_repr(self) -> str:
        """Return the axis."""
        return f"dim={self.dim}"
