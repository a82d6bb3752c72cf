"""QuantizedLinear: a linear layer whose weight is packed codes, so that memory really drops.

A weight is brought back in tiles of rows, or goes into an integer matrix product where the schemes of weight
and input allow one and the machine has it.
"""

from __future__ import annotations

import torch
from torch import nn

from ..formats import IntFormat
from ..functional import quantize
from ..recipes import Activation
from ..schemes import Scheme, ZeroPoint
from ..training import FakeQuantize
from .dynamic_quantize import DynamicQuantize
from .integer_product import integer_product
from .packed_weight import PackedWeight

TILE_VALUES = 1 << 22
"""Numbers of a weight that are dequantized at once: 16 MiB of float32."""


class QuantizedLinear(nn.Module):
    """``y = input @ weight.T + bias`` with a packed weight, and an input quantized on its way in.

    weight: (out_features, in_features). The input and the output are quantized by modules with fixed
    parameters, or with parameters computed from each tensor.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        input_quantizer: FakeQuantize | Activation | None = None,
        *,
        output_quantizer: FakeQuantize | Activation | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.activation = input_quantizer if isinstance(input_quantizer, Activation) else None
        self.input_quantizer = _module(input_quantizer)
        self.output_quantizer = _module(output_quantizer)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._product = integer_product()

    def __setstate__(self, state: dict[str, object]) -> None:
        # What is exact on the machine that saved need not be exact here.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._product = integer_product()

    def refusal(self) -> str | None:
        """Return why the product is not computed on integers, or None when it is."""
        if self.activation is None:
            given = self.input_quantizer is not None
            return "the input has fixed parameters" if given else "the input is not quantized"
        for scheme, each in ((self.weight.scheme, "channel"), (self.activation.scheme, "token")):
            if not _is_plain_int8(scheme):
                return f"{scheme} is not symmetric int8 with float scales"
            if str(scheme.granularity) != each:
                return f"{scheme} does not have one scale a {each}"
        if self.weight.get_buffer("data").device.type != "cpu":
            return "the weight is not in the memory of the host"
        return None if self._product is not None else "no integer product of torch is exact here"

    def explain(self) -> str:
        """Return in words how the product is computed and why."""
        reason = self.refusal()
        if reason is None and self._product is not None:
            return f"int8 product ({self._product[0]})"
        return f"tiles of the weight are dequantized: {reason}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output in the dtype of ``x``: (..., in_features) to (..., out_features)."""
        if self.refusal() is None and not (torch.is_grad_enabled() and x.requires_grad):
            y = self._integer_product(x)
        else:
            y = self._product_of_tiles(x if self.input_quantizer is None else self.input_quantizer(x))
        return y if self.output_quantizer is None else self.output_quantizer(y)

    def _product_of_tiles(self, x: torch.Tensor) -> torch.Tensor:
        weight, total = self.weight, self.out_features
        step = max(1, TILE_VALUES // max(1, self.in_features) // weight.block_rows) * weight.block_rows
        if step >= total:
            return nn.functional.linear(x, weight.tile(0, total, x.dtype), self.bias)
        parts = []
        for start in range(0, total, step):
            stop = min(total, start + step)
            bias = None if self.bias is None else self.bias[start:stop]
            parts.append(nn.functional.linear(x, weight.tile(start, stop, x.dtype), bias))
        return torch.cat(parts, -1)

    def _integer_product(self, x: torch.Tensor) -> torch.Tensor:
        assert self.activation is not None
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        assert self._product is not None
        q, w = quantize(rows, self.activation.scheme), self.weight.quantized()
        y = self._product[1](q.codes, w.codes).to(torch.float32)
        y = y.mul_(q.scales[0].float()).mul_(w.scales[0].float().reshape(1, -1))
        y = y if self.bias is None else y.add_(self.bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def _module(quantizer: FakeQuantize | Activation | None) -> nn.Module | None:
    return DynamicQuantize(quantizer) if isinstance(quantizer, Activation) else quantizer


def _is_plain_int8(scheme: Scheme) -> bool:
    fmt = scheme.element
    whole = isinstance(fmt, IntFormat) and fmt.signed and fmt.bits == 8 and not fmt.fraction_bits
    one_level = len(scheme.scales) == 1 and not scheme.scales[0].rule.power_of_two
    return whole and one_level and scheme.zero_point is ZeroPoint.NONE
