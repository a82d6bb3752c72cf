"""Single tensors of parameters: compared, and printed in short."""

from __future__ import annotations

import torch


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and values; bytes are compared as bytes."""
    bits = (
        (a.view(torch.uint8), b.view(torch.uint8)) if a.dtype == b.dtype and a.element_size() == 1 else (a, b)
    )
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(*bits))


def brief(tensor: torch.Tensor) -> str:
    """Return a tensor in a few characters: its value, or its extremes and shape."""
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    if tensor.is_meta or tensor.numel() == 0:
        return f"of shape {tuple(tensor.shape)}"
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}"
    return f"{tensor.min().item():.6g}..{tensor.max().item():.6g} x {tuple(tensor.shape)}"
