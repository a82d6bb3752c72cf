"""Parts of a matrix in codes, with their parameters.

This module reads no file. This module reads no file.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import UnsupportedError
from ...params import QuantizationParams
from ...schemes import Granularity
from ...tensor import QuantizedTensor


def rows_of(q: QuantizedTensor, rows: torch.Tensor) -> QuantizedTensor:
    """Return some rows of codes; raises UnsupportedError for shared parameters."""
    if any(len(numbers) not in (1, q.shape[0]) for numbers in q.params.stored):
        raise UnsupportedError(f"rows in another order than in the file share a scale in {q.scheme}")
    stored = [numbers if len(numbers) == 1 else numbers[rows] for numbers in q.params.stored]
    params = QuantizationParams.of(q.scheme, (len(rows), q.shape[1]), q.params.dtype, stored)
    return replace(q, data=q.data[rows], params=params, shape=(len(rows), q.shape[1]))


def under_one_scale(q: QuantizedTensor) -> QuantizedTensor:
    """Replace the equal block scales of codes by one tensor scale."""
    (level,) = q.scheme.scales
    scheme = replace(q.scheme, scales=(replace(level, granularity=Granularity.tensor()),))
    scale = q.params.stored[0].flatten()[:1].clone()
    return replace(q, params=QuantizationParams.of(scheme, q.shape, q.params.dtype, [scale]))
