"""Parameters as buffers of a module, which move, are saved and are broadcast with it, and keep their dtypes.

A cast of a model (``half()``, ``to(torch.bfloat16)``) is about its activations; a scale in another dtype
would be another number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..formats.torch_dtypes import format_of, storage_dtype
from ..schemes import Scheme
from .parameters import QuantizationParams


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as uint8: gloo broadcasts no others, and pickle knows not all (torch 2.13)."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def register_params(module: torch.nn.Module, params: QuantizationParams) -> None:
    """Register copies of the tensors of ``params`` as buffers: ``scale1`` and on, ``zero_point``."""
    for name, tensor in params.tensors().items():
        module.register_buffer(name, bytes_of(tensor.detach()).clone())


def buffered_params(
    module: torch.nn.Module, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> QuantizationParams:
    """Return the parameters that lie in the buffers of ``module``, whose memory they share."""
    own = format_of(dtype)
    scales = tuple(
        module.get_buffer(f"scale{number}").view(storage_dtype(level.format_for(own)))
        for number, level in enumerate(scheme.scales, 1)
    )
    return QuantizationParams(
        scheme=scheme, shape=shape, scales=scales, zero_point=module._buffers.get("zero_point"), dtype=dtype
    )


def keeping_dtypes(move: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what ``nn.Module._apply`` does to a tensor, but for changes of its dtype.

    >>> keeping_dtypes(torch.Tensor.half)(torch.ones(1)).dtype
    torch.float32
    """

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        moved = move(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return kept
