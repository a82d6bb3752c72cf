"""Dynamic quantization: parameters from each tensor, entirely or below one scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import RecipeError, UnsupportedError
from ..functional import fake_quantize, quantize_part
from ..params import QuantizationParams
from ..params.module_buffers import keeping_dtypes
from ..recipes import Activation
from ..tensor import QuantizedTensor
from ..training import FakeQuantize


class DynamicQuantize(nn.Module):
    """Quantize and dequantize with parameters computed from each tensor.

    Args:
        activation: a scheme, and that its parameters come from each tensor.

    Raises:
        RecipeError: for what is no Activation, such as its text.
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        if not isinstance(activation, Activation):
            raise RecipeError(
                f"activation (={activation!r}) must be an Activation; write Activation.of('int8:token')"
            )
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the fake-quantized values of ``x``; an empty tensor unchanged.

        Args:
            x: a float tensor of any shape.
        """
        return fake_quantize(x, self.activation.scheme) if x.numel() else x

    def extra_repr(self) -> str:
        """Return the scheme."""
        return str(self.activation)


class LocalQuantize(nn.Module):
    """Fake quantization with one fixed tensor scale and dynamic block scales.

    Args:
        activation: a static one of several levels.
        limit: the largest magnitude of calibration, from which the tensor scale follows; larger values come
            out as the largest codes. Gradients pass unchanged.
    """

    limit: torch.Tensor

    def __init__(self, activation: Activation, limit: float) -> None:
        super().__init__()
        self.activation = activation
        self.register_buffer("limit", torch.tensor([limit], dtype=torch.float32))

    @staticmethod
    def of(activation: Activation, params: QuantizationParams) -> LocalQuantize:
        """Return the quantizer with the range of one block's parameters.

        Args:
            activation: a static one of several levels.
            params: calibrated, of one block.

        Raises:
            UnsupportedError: when the scheme has more than positive float scales.
        """
        if activation.scheme.chained is not None:
            raise UnsupportedError(
                f"{activation.scheme.chained} of {activation.scheme} do not follow from a limit; "
                "use positive float scales"
            )
        scale = params.effective_scale()
        assert scale is not None
        return LocalQuantize(activation, float(scale) * activation.scheme.divisor)

    def codes(self, x: torch.Tensor) -> QuantizedTensor:
        """Return the codes and parameters of ``x``.

        Args:
            x: a float tensor of any shape.
        """
        limit = float(self.limit)
        return quantize_part(x.detach().clamp(-limit, limit), self.activation.scheme, (-limit, limit))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the fake-quantized values of ``x``; an empty tensor unchanged.

        Args:
            x: a float tensor of any shape.
        """
        if not x.numel():
            return x
        y = self.codes(x).dequantize()
        return x + (y - x).detach() if x.requires_grad and torch.is_grad_enabled() else y

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LocalQuantize:
        super()._apply(keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return the scheme."""
        return str(self.activation)


def as_module(quantizer: FakeQuantize | LocalQuantize | Activation | None) -> nn.Module | None:
    """Return a quantizer module; RecipeError for no activation or module.

    >>> as_module(Activation.of("int8:token"))
    DynamicQuantize(int8:token dynamic)
    """
    return quantizer if quantizer is None or isinstance(quantizer, nn.Module) else DynamicQuantize(quantizer)
