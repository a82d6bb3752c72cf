"""Quantize one tensor by any method: what ``zp.quantize`` is."""

from __future__ import annotations

import torch

from .. import functional
from ..errors import CalibrationError, UnsupportedError
from ..params import QuantizationParams
from ..schemes import Scheme
from ..stats import Statistics
from ..tensor import QuantizedTensor
from .channels import kept_with_codes
from .method import LayerData
from .registry import method_named
from .rotate import needs_checkpoint, rotation_of


def quantize(
    x: torch.Tensor, scheme: str | Scheme | QuantizationParams, *, method: str | None = None,
    inputs: torch.Tensor | None = None, out: QuantizedTensor | None = None,
) -> QuantizedTensor:  # fmt: skip
    """Return ``x`` in codes, with parameters computed from ``x`` or given.

    Args:
        x: float64, float32, float16 or bfloat16; any shape and stride; finite; never modified.
        scheme: parameters, or a scheme (also as text, such as ``"int4:g128"``) whose parameters come from
            ``x``.
        method: how codes are chosen, such as ``"mse"`` or ``"mse_weighted"``; ``"nearest"`` if None.
        inputs: for a method that takes data, what a linear layer with the weight ``x`` is given:
            (..., columns of ``x``) floats.
        out: an earlier result for the same scheme, shape and dtype, whose memory is used again; after an
            error its content means nothing. Not for traced code.

    Raises:
        NonFiniteError: for NaN and Inf, with the first index.
        DtypeError: for a tensor of another dtype, layout or device.
        ShapeError: when the blocks of the scheme, or ``out``, do not fit.
        RecipeError: for an unknown method.
        UnsupportedError: for a scheme that a method refuses, a method together with parameters that are
            given, and one that rotates what is multiplied with the result.
        CalibrationError: for a method that needs ``inputs``, which are not given.

    Example:
        >>> quantize(torch.tensor([[1.0, -2.0, 4.0]]), "int8:channel:narrow").codes
        tensor([[ 32, -64, 127]], dtype=torch.int8)
        >>> x = torch.tensor([[1.0, 1.0, 0.95, 1.6]])
        >>> by_range, by_mse = quantize(x, "int2:channel"), quantize(x, "int2:channel", method="mse")
        >>> bool((by_mse.dequantize() - x).square().sum() < (by_range.dequantize() - x).square().sum())
        True
    """
    if method is None:
        return functional.quantize(x, scheme, out=out)
    if isinstance(scheme, QuantizationParams):
        raise UnsupportedError(f"method {method} chooses parameters, and some are given; pass a scheme")
    found = method_named(method)
    if rotation_of(found) is not None:
        raise UnsupportedError(needs_checkpoint(found))
    kept = kept_with_codes(found)
    if kept is not None:
        raise UnsupportedError(f"method {method} keeps {kept}; use zp.quantize_model")
    statistics = {}
    for name, accumulator in {**found.needs, **found.takes}.items():
        if inputs is not None:
            made = accumulator(x.shape[-1])
            state = made.update(made.start(), inputs.reshape(-1, inputs.shape[-1]))
            statistics[name] = Statistics(accumulator=made, state=state)
        elif name in found.needs:
            raise CalibrationError(
                f"method {method} needs the {name} of inputs; pass inputs=, or method='mse'"
            )
    result = found.quantize(x, Scheme.parse(scheme), LayerData(statistics=statistics, out=out))
    if result.rotation is not None:
        raise UnsupportedError(
            f"method {method} rotates what is multiplied with the result; use zp.quantize_model"
        )
    return result.q
