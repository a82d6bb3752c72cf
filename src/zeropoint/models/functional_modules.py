"""Modules for torch functions of several tensors, so that the rules of a recipe can name them."""

from __future__ import annotations

import torch
from torch import nn


class Add(nn.Module):
    """``a + b`` as a module: a rule for type ``Add`` quantizes both terms alike, or the sum.

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
    """``a * b`` as a module: a rule for type ``Multiply`` quantizes both factors alike, or the product."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the product.

        Args:
            a: the first factor.
            b: the second factor.
        """
        return a * b


class Concatenate(nn.Module):
    """``torch.cat`` as a module: a rule for type ``Concatenate`` quantizes all parts alike.

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
