"""Layers whose weights are packed codes: memory really drops, and nothing is dequantized as a whole.

A weight is brought back in tiles of rows, or goes into an integer matrix product where the schemes of weight
and input allow one and the machine has it.
"""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UnsupportedError
from ..formats import IntFormat
from ..functional import fake_quantize, quantize
from ..params import QuantizationParams
from ..recipes import Activation
from ..schemes import Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from ..training import FakeQuantize
from .integer_product import integer_product

TILE_VALUES = 1 << 22
"""Numbers of a weight that are dequantized at once: 16 MiB of float32."""


class PackedWeight(nn.Module):
    """A quantized tensor as buffers, so that it moves, is saved and is counted as any weight.

    Buffers: ``data`` (packed codes, uint8), ``scale1`` and on, ``zero_point`` where there is one.
    """

    def __init__(self, q: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.shape, self.dtype = q.scheme, q.shape, q.dtype
        self.register_buffer("data", q.data)
        self._names = tuple(q.params.tensors())
        for name, tensor in q.params.tensors().items():
            self.register_buffer(name, tensor)

    def quantized(self) -> QuantizedTensor:
        """Return the whole as a quantized tensor that shares this memory."""
        return self._of(
            self.get_buffer("data"), {name: self.get_buffer(name) for name in self._names}, self.shape
        )

    def _of(
        self, data: torch.Tensor, tensors: dict[str, torch.Tensor], shape: tuple[int, ...]
    ) -> QuantizedTensor:
        scales = tuple(tensors[f"scale{n}"] for n in range(1, len(self.scheme.scales) + 1))
        params = QuantizationParams(
            scheme=self.scheme,
            shape=shape,
            scales=scales,
            zero_point=tensors.get("zero_point"),
            dtype=self.dtype,
        )
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=self.dtype)

    @property
    def rows_are_apart(self) -> bool:
        """Whether each row has parameters of its own, but for those of the whole tensor."""
        rank = len(self.shape)
        grids = [level.granularity.grid(self.shape) for level in self.scheme.scales]
        return rank == 2 and all(grid[0] == self.shape[0] or grid == (1, 1) for grid in grids)

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        """Return the values of some rows: ``index`` is a slice or a vector of row numbers.

        Raises UnsupportedError where rows share parameters in blocks.
        """
        if not self.rows_are_apart:
            raise UnsupportedError(f"rows of {self.scheme} share blocks; dequantize the whole weight")
        tensors = {name: self.get_buffer(name) for name in self._names}
        own = {n: t[index] if t.shape[0] == self.shape[0] else t for n, t in tensors.items()}
        data = self.get_buffer("data")[index]
        return self._of(data, own, (data.shape[0], self.shape[1])).dequantize()

    def extra_repr(self) -> str:
        """Return scheme and shape."""
        return f"{self.scheme}, shape={self.shape}"


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
        if not self.weight.rows_are_apart:
            return nn.functional.linear(x, self.weight.quantized().dequantize(x.dtype), self.bias)
        step = max(1, TILE_VALUES // max(1, self.in_features))
        parts = [
            nn.functional.linear(x, self.weight.rows(slice(start, start + step)).to(x.dtype))
            for start in range(0, self.out_features, step)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias

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


class DynamicQuantize(nn.Module):
    """Quantize and bring back with parameters computed from each tensor."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the codes of ``x``; nothing happens to an empty tensor."""
        return fake_quantize(x, self.activation.scheme) if x.numel() else x

    def extra_repr(self) -> str:
        """Return the scheme."""
        return str(self.activation)


def _module(quantizer: FakeQuantize | Activation | None) -> nn.Module | None:
    return DynamicQuantize(quantizer) if isinstance(quantizer, Activation) else quantizer


def _is_plain_int8(scheme: Scheme) -> bool:
    fmt = scheme.element
    whole = isinstance(fmt, IntFormat) and fmt.signed and fmt.bits == 8 and not fmt.fraction_bits
    one_level = len(scheme.scales) == 1 and not scheme.scales[0].rule.power_of_two
    return whole and one_level and scheme.zero_point is ZeroPoint.NONE


class QuantizedEmbedding(nn.Module):
    """A table of packed rows; only the rows that are asked for are dequantized.

    weight: (num_embeddings, embedding_dim). Raises UnsupportedError for schemes in which rows share blocks.
    """

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        if not weight.rows_are_apart:
            raise UnsupportedError(
                f"an embedding needs parameters by rows, which {weight.scheme} does not have"
            )
        self.weight = weight
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``index``, whole numbers of any shape: (..., embedding_dim)."""
        return self.weight.rows(index.reshape(-1)).reshape(*index.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
