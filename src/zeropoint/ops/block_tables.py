"""Reference for elements whose scale is a table of their block.

    encode     code = the number of boundaries between numbers of the block's table that x lies above
    decode     value = table[code]
    search     table = argmin over t of sum_i w_i (min_j |t_j - x_i|)^2, of each block: k-means

Blocks are rows here (:func:`zeropoint.layout.blocks.block_rows`), of a part of the tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import EllipsisType

import numpy as np
import numpy.typing as npt
import torch

from ..formats.codes import times_power_of_two
from ..formats.torch_dtypes import wide_dtype
from ..layout.blocks import block_rows, from_block_rows, pairwise_sums, spread_blocks
from ..params.module_buffers import bytes_of
from ..params.scale_tables import boundaries, stored_tables, tables_of
from ..params.tensors import Params
from ..schemes import Granularity, Scheme
from .clusters import fitted

PART = 1 << 20
"""Elements that temporaries hold at once."""
Pick = slice | EllipsisType
Floats = npt.NDArray[np.float64]
Fit = Callable[[Floats, Floats | None, int], Floats]
"""The tables of rows of numbers, rising, with weights: (rows, n), (rows, n) or None, count -> (rows, count).

Rows may end in Inf, which is no number of theirs. Tables of fewer different numbers repeat the last.
"""


def encoded(x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
    """Return the codes of ``x``, uint8; of NaN the last."""
    shape, wide = tuple(x.shape), wide_dtype(x.dtype)
    tables = tables_of(scheme, params, shape=shape, own_dtype=x.dtype, dtype=wide)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    for pick, own in _parts(scheme, shape):
        codes[pick] = _codes(x[pick].to(wide), scheme.granularity, tables[own])
    return codes


def decoded(codes: torch.Tensor, scheme: Scheme, tables: torch.Tensor) -> torch.Tensor:
    """Return decoded values in the dtype of ``tables``; gradients pass."""
    shape = tuple(codes.shape)
    if codes.numel() == 0:
        return torch.zeros(shape, dtype=tables.dtype, device=codes.device)
    rows = block_rows(codes, scheme.granularity, 0)
    values = tables.reshape(len(rows), -1).gather(1, rows.to(torch.int64))
    return from_block_rows(values, scheme.granularity, shape)


def decoded_into(out: torch.Tensor, codes: torch.Tensor, scheme: Scheme, tables: torch.Tensor) -> None:
    """Write the numbers of ``codes`` to ``out``, of the same shape."""
    for pick, own in _parts(scheme, tuple(codes.shape)):
        out[pick] = decoded(codes[pick], scheme, tables[own])


def inside(x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
    """Return the mask of ``x`` between its table's ends; NaN is outside."""
    shape = tuple(x.shape)
    tables = tables_of(scheme, params, shape=shape, own_dtype=x.dtype, dtype=wide_dtype(x.dtype))
    low, high = (spread_blocks(end, scheme.granularity, shape) for end in (tables[..., 0], tables[..., -1]))
    return torch.isfinite(x) & (x >= low) & (x <= high)


def searched(
    x: torch.Tensor, scheme: Scheme, start: Params, importance: torch.Tensor | None, fit: Fit
) -> Params:
    """Return tables of least squared error, or ``start`` where better.

    importance: weights of the errors, float64, broadcast against ``x``; all alike if None.
    """
    found = start[0].clone()
    weights = None if importance is None else importance.expand(x.shape)
    for pick, own in _parts(scheme, tuple(x.shape)):
        part = None if weights is None else weights[pick]
        found[own] = _searched_part(x[pick], scheme, found[own], part, fit)
    return (found,)


def fitted_rows(rows: Floats, weights: Floats | None, count: int) -> Floats:
    """Return the tables of rows one by one: see :data:`Fit`."""
    tables = np.empty((len(rows), count))
    for n, row in enumerate(rows):
        numbers = row[np.isfinite(row)]
        weight = np.ones_like(numbers) if weights is None else weights[n, : len(numbers)]
        own = fitted(numbers, weight, count)
        tables[n] = [*own, *[own[-1]] * (count - len(own))]
    return tables


def _searched_part(
    x: torch.Tensor, scheme: Scheme, old: torch.Tensor, weights: torch.Tensor | None, fit: Fit
) -> torch.Tensor:
    blocks = scheme.granularity
    rows, order = block_rows(x.double() + 0.0, blocks, math.inf).sort(dim=1, stable=True)
    sorted_weights = None
    if weights is not None:
        sorted_weights = block_rows(weights.double(), blocks, 0.0).gather(1, order).cpu().numpy()
    rows, origin, exponent = _normalized(rows)
    fits = torch.from_numpy(fit(rows.cpu().numpy(), sorted_weights, scheme.element.per_scale))
    tables = times_power_of_two(fits.to(x.device), exponent) + origin
    new = stored_tables(scheme, tables.reshape(old.shape), x.dtype)
    better = _errors(x, scheme, new, weights) < _errors(x, scheme, old, weights)
    kept = torch.where(better[..., None], bytes_of(new), bytes_of(old))
    return kept.view(old.dtype)


def _normalized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sorted rows normalized, with their origin and exponent.

    The number closest to 0, or 0 between them, is subtracted, and rows are divided by a power of two, so that
    squares neither cancel nor overflow. The subtraction is exact in float64 but for numbers that hardly
    count.
    """
    low, high = rows[:, :1], torch.where(torch.isinf(rows), -math.inf, rows).amax(1, keepdim=True)
    origin = low.clamp(min=0) + high.clamp(max=0)
    exponent = torch.frexp(torch.maximum(-low, high)).exponent.to(torch.int64)
    return times_power_of_two(rows - origin, -exponent), origin, exponent


def _errors(
    x: torch.Tensor, scheme: Scheme, stored: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Return each block's weighted squared error, in a fixed order of addition."""
    blocks, wide = scheme.granularity, wide_dtype(x.dtype)
    tables = tables_of(scheme, (stored,), shape=tuple(x.shape), own_dtype=x.dtype, dtype=wide)
    off = decoded(_codes(x.to(wide), blocks, tables), scheme, tables).double() - x.double()
    return pairwise_sums(off.square() if weights is None else off.square() * weights, blocks)


def _codes(x: torch.Tensor, blocks: Granularity, tables: torch.Tensor) -> torch.Tensor:
    rows = block_rows(x, blocks, 0.0).contiguous()
    middles = boundaries(tables).reshape(len(rows), -1)
    found = torch.searchsorted(middles, rows, out_int32=True).to(torch.uint8)
    return from_block_rows(found, blocks, tuple(x.shape))


def _parts(scheme: Scheme, shape: tuple[int, ...]) -> Iterator[tuple[Pick, Pick]]:
    """Yield places of whole blocks along the first axis, and of tables."""
    if not shape:
        yield ..., ...
        return
    if 0 in shape:
        return
    height = scheme.granularity.block_shape(shape)[0]
    step = height * max(1, PART // (height * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        yield slice(start, stop), slice(start // height, -(-stop // height))
