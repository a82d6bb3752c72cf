"""Least-squares block tables: :mod:`zeropoint.ops.block_tables` with kernel fits."""

from __future__ import annotations

import numpy as np
import torch

from ....ops import block_tables
from ....ops.block_tables import Floats
from ....ops.clusters import EXACT
from ....ops.registry import Op, Request
from ....ops.threads import parts_for, share
from ....params.tensors import Params
from .. import entries


def refusal(request: Request) -> str | None:
    """Return why no kernel runs ``request``, whose elements have tables, or None."""
    if request.op is not Op.SEARCH_PARAMS:
        return f"{request.scheme.chained} are known to the reference alone"
    return None


class TableSearchKernel:
    """Tables of least squared error."""

    def __init__(self, request: Request) -> None:
        self._scheme = request.scheme

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None) -> Params:
        """See :class:`zeropoint.ops.registry.Op`."""
        return block_tables.searched(x, self._scheme, params, importance, fitted_rows)


def fitted_rows(rows: Floats, weights: Floats | None, count: int) -> Floats:
    """See :data:`zeropoint.ops.block_tables.Fit`; of long rows, numbers are merged by the reference."""
    blocks, length = rows.shape
    if length > EXACT:
        return block_tables.fitted_rows(rows, weights, count)
    slots, tables = parts_for(blocks, rows.size), np.empty((blocks, count))
    doubles, choices = np.empty((slots, 7, length + 1)), np.empty((slots, count, length + 1), np.int32)
    given = np.zeros((1, 1)) if weights is None else np.ascontiguousarray(weights)
    args = np.ascontiguousarray(rows), given, np.uint64(slots), doubles, choices, tables
    share(entries.fit_tables, args, slots, rows.size)
    return tables
