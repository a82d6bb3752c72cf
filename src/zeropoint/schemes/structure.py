"""Storage structure of a scheme, without the rules that choose its numbers."""

from __future__ import annotations

import torch

from ..formats.torch_dtypes import format_of
from .dialects import TensorScale
from .scheme import Scheme


def stored_numbers(scheme: Scheme, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
    """Return the key under which schemes store the same codes and parameters.

    Schemes of equal keys give the same values to the same codes and parameters. Elements, scales, offsets,
    zero points and center; the last item says whether the scale of the tensor. Is stored as its reciprocal.
    scheme: of a tensor. dtype: of the tensor, and of its scales under ``scale=input``.

    >>> stored_numbers(Scheme.parse("int4:g32")) == stored_numbers(Scheme.parse("int4:g32:narrow"))
    True
    """
    own = format_of(dtype)
    scales, offsets = (
        tuple((level.granularity, level.format_for(own)) for level in levels)
        for levels in (scheme.scales, scheme.offsets)
    )
    several = len(scheme.scales) > 1 and not scheme.scales[-1].rule.power_of_two
    inverse = several and scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
    return scheme.element, scales, offsets, scheme.zero_point, scheme.center, inverse
