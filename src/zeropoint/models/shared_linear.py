"""Linear layers on shared memory, and with memory of their own."""

from __future__ import annotations

import torch
from torch import nn

TRANSPOSED = "zeropoint_transposed"
"""Attribute of a Linear layer that replaces one whose weight is (in, out)."""


def linear_on(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return a layer sharing ``weight`` (out, in) and ``bias``, trainability included."""
    with torch.device("meta"):  # no numbers are drawn for it
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return layer


def own_memory(layer: nn.Linear) -> nn.Linear:
    """Give a layer's parameters contiguous memory; the objects stay."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return layer
