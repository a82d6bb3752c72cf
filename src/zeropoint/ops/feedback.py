"""Dense products of GPTQ: Gram matrices, factors, and error feedback.

    h = m diag(d) m^T              m unit upper triangular, in the order in which columns are processed
    t_j = w_j + sum_{k<j} (w_k - q_k) m_kj          q_j = the value nearest to t_j
    (w - q) h (w - q)^T = sum_j d_j (t_j - q_j)^2

The feedback of LDLQ (QuIP, arXiv:2307.13304), equal to GPTQ (arXiv:2210.17323) without an inverse. All sums
have one order, so that results are the same bytes on every processor and for any number of threads.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from ..errors import DtypeError, RangeError, ShapeError
from . import feedback_reference
from .feedback_grid import Grid, TriangularFactors
from .library import dense_for
from .registry import Dense
from .threads import gradual_underflow

__all__ = [
    "Grid", "TriangularFactors", "descend", "factor", "feed_back", "gram", "output_errors", "solve",
    "squares",
]  # fmt: skip
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _backend(x: torch.Tensor) -> Dense | ModuleType:
    return dense_for(x) or feedback_reference


def squares(x: torch.Tensor, *, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return float64 sums of squares of columns, token by token.

    x: (tokens, columns) of floats. into: (columns,) float64, sums of earlier tokens, to which these are
    added; zeros if None.

    >>> squares(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    tensor([10.,  4.], dtype=torch.float64)
    """
    _require_floats(x)
    before = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device) if into is None else into
    backend = feedback_reference if x.dtype is torch.float64 else _backend(x)
    with gradual_underflow():
        return backend.squares(x.detach(), before)


def gram(x: torch.Tensor, y: torch.Tensor | None = None, *, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x^T y`` in float64, summed over tokens.

    The result is (columns of x, columns of y). Numbers are rounded to 12 significant bits, half to even, so
    that products are exact in float32; bfloat16 and float16 are as they are. Products of 64 tokens are added
    in float32, one after the other, and their sums in float64. A number below 2**-60 counts as zero; from
    2**60 on all are scaled down first, by a power of two. Tokens that come in parts of multiples of 64, each
    ``into`` the result before, give the bytes of all together, as long as none is scaled.

    Args:
        x: (tokens, columns) of finite floats.
        y: the same tokens; ``x`` if None, which takes half the time.
        into: float64, the result of earlier tokens, to which these are added; zeros if None.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
        tensor([[10.,  2.],
                [ 2.,  4.]], dtype=torch.float64)
    """
    _require_floats(x)
    columns = x.shape[1]
    if y is not None:
        _require_floats(y)
        columns = y.shape[1]
        if len(x) != len(y):
            raise ShapeError(f"y ({len(y)} tokens) must have those of x ({len(x)} tokens)")
    shape = x.shape[1], columns
    before = torch.zeros(shape, dtype=torch.float64, device=x.device) if into is None else into
    if tuple(before.shape) != shape:
        raise ShapeError(f"into (shape {tuple(before.shape)}) must have shape {shape}")
    with gradual_underflow():
        return _backend(x).gram(x.detach(), None if y is None else y.detach(), before)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b``, with sums in the fixed order of :func:`gram`."""
    return gram(a.T.contiguous(), b.contiguous())


def factor(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``m`` and ``d`` of ``h = m diag(d) m^T``.

    ``m`` is unit upper triangular, and the pivots ``d`` are positive. Columns are eliminated from the last to
    the first, each from earlier ones, and only the upper half of ``h`` is read. h: (columns, columns)
    float64, symmetric and positive definite. Raises RangeError for a pivot that is not positive: add to the
    diagonal.

    >>> m, d = factor(torch.tensor([[3.0, 2.0], [2.0, 2.0]], dtype=torch.float64))
    >>> m, d
    (tensor([[1., 1.],
            [0., 1.]], dtype=torch.float64), tensor([1., 2.], dtype=torch.float64))
    """
    _require_square(h, "h")
    with gradual_underflow():
        found = _backend(h).factor(h.detach())
    if found.failed is not None:
        raise RangeError(
            f"h (shape {tuple(h.shape)}) is not positive definite: the pivot of column {found.failed} is "
            f"{float(found.m[found.failed, found.failed])}; add a multiple of its mean to its diagonal"
        )
    return found.m, found.d


def feed_back(
    weight: torch.Tensor, m: torch.Tensor, d: torch.Tensor, order: torch.Tensor | None, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight rounded column by column with error feedback.

    Values, of the shape of the weight and the dtype of the grid's scale, and losses, (rows,) float64:. ``(w -
    q) h (w - q)^T`` of each row. weight: (rows, columns) float32 or float64, finite. m, d: factors of the
    matrix whose rows and columns are in ``order``. order: (columns,) int64, the column that is processed
    first, and so on; as they are if None. grid: how numbers are rounded; its columns match ``weight``.
    """
    _require_rows(weight, m, grid)
    if d.shape != m.shape[:1]:
        raise ShapeError(f"d (shape {tuple(d.shape)}) must have a pivot for each of {len(m)} columns of m")
    own = weight.detach()
    if order is not None:
        own, grid = own[:, order], replace(grid, block_of=grid.block_of[order])
    with gradual_underflow():
        values, losses = _backend(weight).feed_back(own, m, d, grid)
        return _restored(values.to(grid.scale.dtype), order), losses


def output_errors(
    weight: torch.Tensor, values: torch.Tensor, m: torch.Tensor, d: torch.Tensor, order: torch.Tensor | None
) -> torch.Tensor:
    """Return each row's squared output error, for given values.

    Errors are ``(w - q) h (w - q)^T``, (rows,) float64. weight, m, d, order: as of :func:`feed_back`. values:
    ``q``, of the shape of the weight; finite.

    >>> m, d = factor(torch.tensor([[3.0, 2.0], [2.0, 2.0]], dtype=torch.float64))
    >>> output_errors(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), m, d, None)
    tensor([9.], dtype=torch.float64)
    """
    if values.shape != weight.shape:
        raise ShapeError(f"values (shape {tuple(values.shape)}) must have the shape of {tuple(weight.shape)}")
    # A grid of one number for each column leaves feedback no choice.
    only = Grid(
        levels=torch.zeros(1, dtype=torch.float64, device=weight.device),
        scale=torch.ones_like(values),
        block_of=torch.arange(weight.shape[-1], device=weight.device),
        offset=values.contiguous(),
    )
    return feed_back(weight, m, d, order, only)[1]


def solve(
    y: torch.Tensor, m: torch.Tensor, d: torch.Tensor, order: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``y h^-1``, (rows, columns) float64, for ``h = m diag(d) m^T``.

    y: (rows, columns) float64. m, d: factors of the matrix whose rows and columns are in ``order``. order: as
    of :func:`feed_back`.

    >>> h = torch.tensor([[3.0, 2.0], [2.0, 2.0]], dtype=torch.float64)
    >>> solve(h, *factor(h))
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    _require_rows(y, m, None)
    backend, own = _backend(y), y.detach()
    with gradual_underflow():
        # z m^T = y, from the last column to the first: the same substitution, on all of it reversed.
        reversed_m = m.T.flip((0, 1)).contiguous()
        reversed_y = (own if order is None else own[:, order]).flip(1).contiguous()
        z = backend.substitute(reversed_y, reversed_m).flip(1)
        return _restored(backend.substitute((z / d).contiguous(), m), order)


def descend(
    weight: torch.Tensor, values: torch.Tensor, h: torch.Tensor, order: torch.Tensor | None, grid: Grid, *,
    sweeps: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return values improved by coordinate descent on the squared output error.

        minimize (w - q) h (w - q)^T:   g_j = ((w - q) h)_j,   q_j = the value nearest to q_j + g_j / h_jj

    Args:
        weight: (rows, columns) float32 or float64, finite.
        values: initial values, of the shape of the weight.
        h: (columns, columns) float64, symmetric, its columns as in ``weight``.
        order, grid: as of :func:`feed_back`.
        sweeps: times that all columns are visited at most; it ends with one that moves nothing.

    Returns:
        Values as :func:`feed_back` has them, and how many moved in each sweep, (sweeps,) int64.
    """
    _require_square(h, "h")
    _require_rows(weight, h, grid)
    if values.shape != weight.shape:
        raise ShapeError(f"values (shape {tuple(values.shape)}) must have the shape of {tuple(weight.shape)}")
    own, start, matrix = weight.detach(), values.detach(), h.detach()
    if order is not None:
        own, start, matrix = own[:, order], start[:, order], matrix[order][:, order]
        grid = replace(grid, block_of=grid.block_of[order])
    with gradual_underflow():
        found, moved = _backend(weight).descend(own, start, matrix.contiguous(), grid, sweeps)
    return _restored(found.to(grid.scale.dtype), order), moved


def _restored(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return columns in their own order."""
    if order is None:
        return values.clone(memory_format=torch.contiguous_format)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return values[:, places]


def _require_floats(x: torch.Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise DtypeError(f"tensor (shape {tuple(x.shape)}, {x.dtype}) must hold floats of 16 to 64 bits")
    if x.ndim != 2:
        raise ShapeError(f"tensor (shape {tuple(x.shape)}) must have two axes, tokens and columns")


def _require_square(h: torch.Tensor, name: str) -> None:
    if h.dtype is not torch.float64:
        raise DtypeError(f"{name} ({h.dtype}) must be float64; use {name}.double()")
    if h.ndim != 2 or h.shape[0] != h.shape[1]:
        raise ShapeError(f"{name} (shape {tuple(h.shape)}) must be a square matrix")


def _require_rows(x: torch.Tensor, m: torch.Tensor, grid: Grid | None) -> None:
    """Raise ShapeError or DtypeError for an unfit matrix or grid."""
    _require_square(m, "m")
    _require_floats(x)
    if x.shape[1] != len(m):
        raise ShapeError(f"tensor (shape {tuple(x.shape)}) must have the {len(m)} columns of its matrix")
    if grid is not None and (len(grid.scale) != len(x) or len(grid.block_of) != len(m)):
        raise ShapeError(
            f"grid (scale {tuple(grid.scale.shape)}, block_of {tuple(grid.block_of.shape)}) must have the "
            f"rows and columns of a weight of shape {tuple(x.shape)}"
        )
