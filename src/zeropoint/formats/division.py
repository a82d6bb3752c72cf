"""Division of tensors by numbers, and of numbers by tensors, with one rounding on every device.

torch divides a tensor by a Python number on a GPU, and a number by a tensor anywhere, as a product with the
rounded reciprocal: in float32 many quotients differ in the last bit.
"""

import torch


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """Return ``x / number``, ``number`` rounded to the dtype of ``x`` first."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def over(number: float, x: torch.Tensor) -> torch.Tensor:
    """Return ``number / x``, ``number`` rounded to the dtype of ``x`` first."""
    return torch.full((), number, dtype=x.dtype, device=x.device) / x
