"""QuantizedLinear: a linear layer on packed codes, saving memory.

:mod:`zeropoint.models.linear_paths` chooses how it computes.
"""

from __future__ import annotations

import torch
from torch import nn

from ..errors import DtypeError, NonFiniteError, ShapeError
from ..recipes import Activation
from ..training import FakeQuantize
from .dynamic_quantize import LocalQuantize, as_module
from .layer import placed
from .linear_paths import Run, explain, prepared
from .packed_weight import PackedWeight


class QuantizedLinear(nn.Module):
    """A linear layer, ``input @ weight.T + bias``, with packed weight.

    For codes of a rotated weight, the input is rotated first, then quantized.

    Args:
        weight: (out_features, in_features). The input and the output are quantized by modules with fixed
            parameters, or with parameters computed from each tensor.
        bias: shape (out_features,), or None.
        input_quantizer: quantizes the input, or None.
        output_quantizer: quantizes the output, or None.
        transposed: whether the float layer's weight was (in, out). place: its name in the model, for
            messages.

    Raises:
        ShapeError: for a bias of another length than out_features.
    """

    place: str = ""

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        input_quantizer: FakeQuantize | LocalQuantize | Activation | None = None,
        *,
        output_quantizer: FakeQuantize | LocalQuantize | Activation | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.transposed = transposed
        self.input_quantizer = as_module(input_quantizer)
        self.output_quantizer = as_module(output_quantizer)
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ShapeError(
                f"bias (shape {tuple(bias.shape)}) must have shape ({self.out_features},), a number for each "
                "row of the weight"
            )
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._ways = prepared(self)

    def __getstate__(self) -> dict[str, object]:
        # What is exact and fast on the machine that saves need not be so on the one that loads.
        return {key: value for key, value in self.__dict__.items() if key != "_ways"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._ways = prepared(self)

    def explain(self) -> str:
        """Return the product's path in words, and refusals of faster ones.

        The ways on integers serve float32, bfloat16 and float16 in the memory of the host where no gradient
        is asked for; other inputs take the next.
        """
        rotation = self.weight.rotation
        more = ", and by two narrow matrices" if self.weight.has_low_rank else ""
        return explain(self) + ("" if rotation is None else f", of the input rotated by {rotation}") + more

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (what torch calls it)
        """Return outputs (..., out_features) in the dtype of ``input``.

        Args:
            input: shape (..., in_features).

        Raises:
            ShapeError: for another number of features.
            DtypeError: for an input of integers.
        """
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            raise ShapeError(
                f"input (shape {tuple(input.shape)}) must have {self.in_features} numbers along its last "
                "axis, as many as the weight has columns"
            )
        if not input.is_floating_point():
            raise DtypeError(f"input ({input.dtype}) must be a tensor of floats; convert it first")
        try:
            x = self.weight.rotated(input)
            y, more = self._run_for(x)(x), self.weight.low_rank_product(input)
            y = y if more is None else y + more
            return y if self.output_quantizer is None else self.output_quantizer(y)
        except NonFiniteError as error:
            raise placed(error, self.place) from error

    def _run_for(self, x: torch.Tensor) -> Run:
        for takes, run in self._ways[:-1]:
            if takes(self, x):
                return run
        return self._ways[-1][1]

    def extra_repr(self) -> str:
        """Return sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
