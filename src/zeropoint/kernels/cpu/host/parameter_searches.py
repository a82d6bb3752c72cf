"""Least-squares parameters from a start: by which kernel, or torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....formats import CodebookFormat
from ....formats.torch_dtypes import format_of, storage_dtype, wide_dtype
from ....ops import affine_fits, block_errors, block_tables, lowering, scale_search, window_search
from ....ops.block_tables import Floats
from ....ops.clusters import EXACT
from ....ops.code_tables import code_order, value_table
from ....ops.integer_fits import fits_codes
from ....ops.lowering import LoweredRule, Narrow
from ....ops.registry import Op, Request, kernel_of
from ....ops.threads import parts_for, share
from ....params import QuantizationParams
from ....params.effective import over_reciprocal
from ....params.ladder import Ladder
from ....params.scale_windows import has_window, window_of
from ....params.stored import load_scale
from ....params.tensors import Params
from ....schemes import Granularity, Scheme, ZeroPoint
from ..least_error.affine_scales import AffineFitting, affine_slots
from ..least_error.lanes import LANES
from ..least_error.long_fits import long_fitted_slots
from ..least_error.powers import Power
from ..least_error.table_fits import fitted_slots
from ..least_error.tried_scales import ScaleTries, tried_slots
from ..machine.descriptor import THRESHOLDS, Descriptor
from ..machine.named_records import pack
from .arrays import code_step, flat_array
from .views import View, view_of
from .window_ends import in_whole_blocks, tried_fits

_NO_WEIGHTS = np.zeros(1, np.float64)
_Search = Callable[[torch.Tensor, Params, torch.Tensor | None], Params]


class SearchParamsKernel:
    """Parameters of least squared error."""

    def __init__(self, request: Request) -> None:
        self._scheme = request.scheme

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None) -> Params:
        return search_params(x, self._scheme, params, importance)


def search_params(
    x: torch.Tensor, scheme: Scheme, start: Params, importance: torch.Tensor | None = None
) -> Params:
    """Least-squares parameters of finite ``x``, found from ``start``."""
    search = _search_of(scheme, tuple(x.shape), x.dtype, importance is not None) if x.numel() else None
    if search is not None:
        return search(x, start, importance)
    params = QuantizationParams.of(scheme, tuple(x.shape), x.dtype, start)
    power = _power_of(scheme)
    return scale_search.searched(x, params, decoded, importance=importance, power=power).stored


def decoded(x: torch.Tensor, params: QuantizationParams) -> torch.Tensor:
    """Decode the codes of ``x`` under parameters, in the wide dtype."""
    encoding = Request(
        op=Op.QUANTIZE,
        scheme=params.scheme,
        shape=tuple(x.shape),
        dtype=x.dtype,
        own_dtype=x.dtype,
        device=x.device,
    )
    decoding = replace(encoding, op=Op.DEQUANTIZE, dtype=wide_dtype(x.dtype))
    values: torch.Tensor = kernel_of(decoding).run(kernel_of(encoding).run(x, params.stored), params.stored)
    return values


@functools.lru_cache(maxsize=1024)
def _search_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> _Search | None:
    """Return the search by a kernel, or None where plain torch searches."""
    view, ladder = view_of(scheme, shape, dtype), Ladder.of(scheme.scales[0], dtype)
    if storage_dtype(scheme.scales[0].format_for(format_of(dtype))) is torch.float64:
        return None  # kernels give float32
    if not isinstance(view, View) or not view.one_pass or scheme.offsets:
        return None
    if view.layout.block % 16 or view.layout.cols % view.layout.block:
        return None  # rows are not whole blocks of whole vectors
    if affine_fits.fits_affine(scheme) and scheme.search is None and ladder.table is None:
        return AffineSearch(scheme, shape, view, dtype).run
    fits = ladder.table is None and has_window(scheme) and not weighted
    if fits and _power_of(scheme) == 2 and fits_codes(scheme):
        return LongFits(scheme, shape, view, dtype).run
    return ScaleSearch(scheme, shape, view, dtype, weighted).run if _tries(scheme, weighted) else None


def _tries(scheme: Scheme, weighted: bool) -> bool:
    """Whether the scale-trying kernel knows the scheme; coarse: the tensor's."""
    if not has_window(scheme) or scale_search.searched_levels(scheme) != [0]:
        return False
    coarser = [level.granularity for level in scheme.scales[1:]]
    either = scheme.search is not None and scheme.search.factor
    known = not either and (_power_of(scheme) == 2 or not weighted)
    return known and coarser in ([], [Granularity.tensor()])


def _power_of(scheme: Scheme) -> float:
    return 2.0 if scheme.search is None else scheme.search.power


_NARROW = {torch.bfloat16: Narrow.BFLOAT16, torch.float16: Narrow.FLOAT16}


def _rule_of(scheme: Scheme, dtype: torch.dtype) -> LoweredRule:
    """Look up rounding of given scales and step of codes."""
    kind = storage_dtype(scheme.scales[0].format_for(format_of(dtype)))
    return lowering.GIVEN._replace(stored=_NARROW.get(kind, Narrow.NONE), unit=float(code_step(scheme)))


class AffineSearch:
    """Scales and zero points of whole codes; see :mod:`zeropoint.ops.affine_fits`."""

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], view: View, dtype: torch.dtype) -> None:
        element = lowering.element_of(scheme, dtype, multiply=False)
        self._descriptor = pack(Descriptor(view.layout, element, _rule_of(scheme, dtype)))
        self._shape, block, row = shape, view.layout.block, not in_whole_blocks(view)
        self._at_once, ladder = block if row else block * int(LANES), Ladder.of(scheme.scales[0], dtype)
        self._fitting = AffineFitting(
            least=ladder.least,
            most=ladder.most,
            inverse=affine_fits.MOST_INVERSE,
            places=affine_fits.places_of(scheme, block),
            steps=affine_fits.PLACES_OF_RANGE,
            patience=affine_fits.PATIENCE,
            fits=affine_fits.FITS,
            real=scheme.zero_point is ZeroPoint.REAL,
            row=row,
            widths=np.array(affine_fits.WIDTHS, np.float64),
        )

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None) -> Params:
        scale, zero = (level.to(torch.float32, copy=True) for level in params)
        weights, pitch = _weights_of(importance, self._shape)
        slots = parts_for(scale.numel(), math.prod(self._shape))
        fitting = self._fitting._replace(weighted=importance is not None, pitch=pitch, slots=slots)
        room = _room(slots * self._at_once, 3, 5)
        args = flat_array(x), self._descriptor, weights, pack(fitting), fitting.widths
        outputs = flat_array(scale), flat_array(zero), *room
        share(affine_slots, (*args, *outputs), slots, math.prod(self._shape))
        return scale.to(params[0].dtype), zero.to(params[1].dtype)


class ScaleSearch:
    """Scales of blocks of any elements; see :mod:`zeropoint.ops.window_search`."""

    def __init__(
        self, scheme: Scheme, shape: tuple[int, ...], view: View, dtype: torch.dtype, weighted: bool
    ) -> None:
        self._scheme, self._shape, self._dtype = scheme, shape, dtype
        element = lowering.element_of(scheme, dtype, multiply=False)
        self._descriptor = pack(Descriptor(view.layout, element, _rule_of(scheme, dtype)))
        self._ladder = Ladder.of(scheme.scales[0], dtype)
        window = window_of(scheme, view.layout.block, _power_of(scheme))
        if weighted:  # weights leave no lower end
            window = replace(window, doubling=math.inf)
        table = [] if self._ladder.table is None else self._ladder.table.tolist()
        known = set(table)
        doubled = sum(2 * value in known for value in table)
        exponent, squares, odd, part = block_errors.factors_of(_power_of(scheme))
        least, largest = (0.0, 0.0) if table else (self._ladder.least, self._ladder.most)
        block, row = view.layout.block, not in_whole_blocks(view)
        self._at_once = block if row else block * int(LANES)
        by_largest = window_search.clips_by_largest(scheme, shape, weighted)
        self._tries = ScaleTries(
            doubled=doubled,
            halving=window.halving,
            empty=window.empty,
            doubling=window.doubling,
            reach=window_search.reach_of(window),
            end=window.most * window_search.SAFE,
            safe=window_search.SAFE,
            top=window.halving,
            least=least,
            largest=largest,
            over=over_reciprocal(scheme, 0),
            checked=window_search.checked_after(by_largest=by_largest),
            largest_clips=by_largest,
            row=row,
            power=Power(exponent=exponent, squares=squares, odd=odd, part=part),
            parts=np.array(window_search.PARTS, np.float64),
            table=np.array(table, np.float32),
            halved=np.array([value / 2 in known for value in table], np.uint8),
            values=_values_in_order(scheme),
        )

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None) -> Params:
        fine, *coarser = params
        scale = self._ladder.load(fine).to(torch.float32).contiguous()
        weights, pitch = _weights_of(importance, self._shape)
        coarse = 1.0
        if coarser:
            fmt = self._scheme.scales[1].format_for(format_of(self._dtype))
            coarse = float(load_scale(coarser[0], fmt, torch.float32).reshape(-1)[0])
        slots = parts_for(scale.numel(), math.prod(self._shape))
        tries = self._tries._replace(coarse=coarse, weighted=importance is not None, pitch=pitch, slots=slots)
        floats, doubles = _room(slots * self._at_once, 2, 3)
        arrays = tries.parts, tries.table, tries.halved, tries.values
        args = flat_array(x), self._descriptor, weights, pack(tries), arrays
        outputs = flat_array(scale), floats, doubles
        share(tried_slots, (*args, *outputs), slots, math.prod(self._shape))
        found = self._ladder.store(scale.double())
        return window_search.picked(scale > 0, found, fine), *coarser


class LongFits:
    """Scales that fit integer codes, in blocks of any length; see :mod:`zeropoint.ops.integer_fits`."""

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], view: View, dtype: torch.dtype) -> None:
        element = lowering.element_of(scheme, dtype, multiply=False)
        self._descriptor = pack(Descriptor(view.layout, element, _rule_of(scheme, dtype)))
        self._size, self._block = math.prod(shape), view.layout.block
        self._ladder = Ladder.of(scheme.scales[0], dtype)
        self._fitting = tried_fits(scheme, self._block, dtype)

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None) -> Params:
        """See :class:`zeropoint.ops.registry.Op`; there are no weights of errors."""
        (fine,) = params
        scale = fine.to(torch.float32, copy=True).contiguous()
        slots = parts_for(scale.numel(), self._size)
        room = _room(slots * self._block, 2, 2)
        fitting = self._fitting._replace(slots=slots)
        args = flat_array(x), self._descriptor, pack(fitting), fitting.ratios
        share(long_fitted_slots, (*args, flat_array(scale), *room), slots, self._size)
        return (window_search.picked(scale > 0, self._ladder.store(scale.double()), fine),)


def _room(count: int, floats: int, doubles: int) -> tuple[Any, Any]:
    """Room for ``count`` times some float32 and float64, at least one."""
    return np.empty(max(1, floats * count), np.float32), np.empty(max(1, doubles * count), np.float64)


def _values_in_order(scheme: Scheme) -> Any:
    """Return the values of a codebook's codes in their order, (16,) float32."""
    if not isinstance(scheme.element, CodebookFormat):
        return np.zeros(THRESHOLDS + 1, np.float32)
    return value_table(scheme)[code_order(scheme)]


def _weights_of(importance: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Weights as a flat array, and their row pitch: 0 if shared."""
    if importance is None:
        return _NO_WEIGHTS, 0
    wide = importance.to(torch.float64)
    if wide.numel() != shape[-1] or wide.shape[-1:] != shape[-1:]:
        return _doubles(wide.expand(shape)), shape[-1]
    return _doubles(wide), 0


def _doubles(x: torch.Tensor) -> Any:
    return flat_array(x.contiguous()).view(np.float64)


def table_refusal(request: Request) -> str | None:
    """Return why no kernel runs ``request``, whose elements have tables, or None."""
    if request.op is not Op.SEARCH_PARAMS:
        return f"{request.scheme.chained} are known to the reference alone"
    return None


class TableSearchKernel:
    """Tables of least squared error."""

    def __init__(self, request: Request) -> None:
        self._scheme = request.scheme

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None) -> Params:
        return block_tables.searched(x, self._scheme, params, importance, fitted_rows)


def fitted_rows(rows: Floats, weights: Floats | None, count: int) -> Floats:
    """See :data:`zeropoint.ops.block_tables.Fit`; of long rows, numbers are merged by the reference."""
    blocks, length = rows.shape
    if length > EXACT:
        return block_tables.fitted_rows(rows, weights, count)
    slots, tables = parts_for(blocks, rows.size), np.empty((blocks, count))
    doubles, choices = np.empty((slots, 6, length + 1)), np.empty((slots, count, length + 1), np.int32)
    given = np.zeros((1, 1)) if weights is None else np.ascontiguousarray(weights)
    args = np.ascontiguousarray(rows), given, np.uint64(slots), doubles, choices, tables
    share(fitted_slots, args, slots, rows.size)
    return tables
