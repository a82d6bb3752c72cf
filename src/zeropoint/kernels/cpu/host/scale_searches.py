"""Parameters by any rule: block statistics, or a search comparing errors."""

from __future__ import annotations

import torch

from ....ops import reference, scale_search
from ....params.tensors import Params
from ....schemes import Scheme
from . import statistics
from .parameter_searches import decoded, search_params
from .statistics import Ends


def choose_params(x: torch.Tensor, scheme: Scheme, extremes: Ends) -> Params:
    """Return the parameters that ``x`` gives."""
    start = statistics.choose_params(x, scheme, extremes)
    if scheme.search is None:
        return start
    reference.require_whole(scheme, extremes)
    if scheme.search.factor:
        return scale_search.chosen(x, scheme, start, decoded)
    return search_params(x, scheme, start)
