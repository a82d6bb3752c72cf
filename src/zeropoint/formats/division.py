"""Division by and of Python numbers, rounded once on every device.

torch divides a tensor by a Python number on a GPU, and a number by a tensor anywhere, as a product with the
rounded reciprocal: in float32 many quotients differ in the last bit.
"""

import math

import torch


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """Return ``x / number``, ``number`` rounded to the dtype of ``x`` first."""
    return x / _scalar(number, x)


def over(number: float, x: torch.Tensor) -> torch.Tensor:
    """Return ``number / x``, ``number`` rounded to the dtype of ``x`` first."""
    return _scalar(number, x) / x


def _scalar(number: float, x: torch.Tensor) -> torch.Tensor:
    """Return a 0-d tensor of a number; overflow gives Inf."""
    if abs(number) > torch.finfo(x.dtype).max:
        number = math.copysign(math.inf, number)
    return torch.full((), number, dtype=x.dtype, device=x.device)
