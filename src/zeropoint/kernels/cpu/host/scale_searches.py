"""Parameters by any rule: from statistics of blocks, and where the rule compares errors a search."""

from __future__ import annotations

import torch

from ....formats.torch_dtypes import wide_dtype
from ....ops import reference, scale_search
from ....ops.registry import Op, Request, kernel_of
from ....params import QuantizationParams
from ....params.tensors import Params
from ....schemes import Scheme
from . import statistics
from .statistics import Ends


def choose_params(x: torch.Tensor, scheme: Scheme, extremes: Ends) -> Params:
    """Return the parameters that ``x`` gives."""
    start = statistics.choose_params(x, scheme, extremes)
    if scheme.search is None:
        return start
    reference.require_whole(scheme, extremes)
    return scale_search.chosen(x, scheme, start, decoded)


def decoded(x: torch.Tensor, params: QuantizationParams) -> torch.Tensor:
    """Return what the codes of ``x`` under these parameters decode to, in the wide dtype."""
    encoding = Request(
        op=Op.QUANTIZE, scheme=params.scheme, shape=tuple(x.shape), dtype=x.dtype, own_dtype=x.dtype,
        device=x.device,
    )  # fmt: skip
    decoding = Request(
        op=Op.DEQUANTIZE, scheme=params.scheme, shape=tuple(x.shape), dtype=wide_dtype(x.dtype),
        own_dtype=x.dtype, device=x.device,
    )  # fmt: skip
    values: torch.Tensor = kernel_of(decoding).run(kernel_of(encoding).run(x, params.stored), params.stored)
    return values
