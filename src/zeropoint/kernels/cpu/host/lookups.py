"""Rare elements: looked-up values, block tables, codes of digits.

What no kernel takes is left to the reference, as ever.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from ....formats import ChoiceFormat, DigitsFormat
from ....formats.codes import decode, decode_runs, encode_codebook
from ....layout import code_rows, packing
from ....ops import reference
from ....ops.reference_backend import Codes, filled
from ....ops.registry import Request
from ....ops.threads import share
from ....params import arithmetic
from ....params.arithmetic import Ranges
from ....params.scale_tables import boundaries, tables_of
from ....params.tensors import Params, require_parameters
from ....schemes import Scheme
from ..decode.lookup_rows import OF_BLOCK, OF_DIGIT, OF_SIGN, SHARED, LookupRows, lookup_rows
from ..encode.table_rows import DigitRows, TableRows, digit_rows, table_rows
from ..machine import descriptor as k
from ..machine.named_records import pack
from ..machine.tile import TILE
from ..machine.vector import STEP
from . import memory
from .arrays import block_factors, flat_array
from .calls import flat_bytes
from .rare_requests import digits_of, has_five_digits
from .statistics import Ends, block_extremes
from .views import KINDS


class LookupKernel:
    """Values of codes."""

    def __init__(self, request: Request) -> None:
        scheme, shape = request.scheme, request.shape
        element, block = scheme.element, scheme.row_block(shape)
        self._request, self._rows = request, math.prod(shape[:-1])
        self._whose = OF_BLOCK if element.per_scale > 1 else OF_SIGN if element.reads_sign else SHARED
        if has_five_digits(element) and block % STEP == 0 and block <= TILE and shape[-1] % block == 0:
            self._whose = OF_DIGIT
        self._bytes = code_rows.packed_shape(scheme, shape)
        width = -(-shape[-1] // block)
        self._sizes = pack(
            LookupRows(
                bits=scheme.bits,
                per=element.per_code,
                block=block,
                cols=shape[-1],
                width=width,
                row_bytes=self._bytes[-1],
                kind=KINDS[request.dtype],
                whose=int(self._whose),
            )
        )
        self._blocks = self._rows * width
        self._table = None if self._whose == OF_BLOCK else _table_of(scheme, digits=self._whose == OF_DIGIT)

    def run(self, data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        asked = self._request
        require_parameters(asked.scheme, params, asked.shape)
        out = memory.empty(asked.shape, asked.dtype) if out is None else out
        if self._table is None:
            tables = flat_array(_tables(asked, params))
            factors = np.ones(self._blocks, np.float32)
        else:
            tables, factors = self._table, np.ones(self._blocks, np.float32)
            if asked.scheme.scales:
                factors, _ = block_factors(asked.scheme, params, asked.shape, asked.own_dtype, dividing=False)
        source = flat_bytes(data.contiguous(), math.prod(self._bytes))
        args = source, self._sizes, tables, factors, flat_array(out)
        share(lookup_rows, args, self._rows, out.numel())
        return out

    def hold(self, _: Params | None) -> str:
        return _ALLOCATES


_ALLOCATES = "tables and factors are made in memory of each call"


@functools.lru_cache(maxsize=64)
def _table_of(scheme: Scheme, *, digits: bool) -> Any:
    """Values of all codes, or digits, in scale units; maybe two grids."""
    element = scheme.element
    if digits:
        assert isinstance(element, DigitsFormat)
        values = decode(
            torch.arange(element.base, dtype=torch.int32, device="cpu"), element.digit, torch.float32
        )
        return np.append(flat_array(values), np.zeros(k.LONGEST_CODE, np.float32))
    codes = torch.arange(1 << scheme.bits, dtype=torch.int32, device="cpu")
    if isinstance(element, ChoiceFormat):
        grids = [
            decode(codes, element, torch.float32, torch.full((len(codes),), sign)) for sign in (False, True)
        ]
        values = torch.cat(grids)
    else:
        values = decode_runs(codes, element, torch.float32)
    return np.append(flat_array(values), np.zeros(k.LONGEST_CODE, np.float32))


def _tables(request: Request, params: Params) -> torch.Tensor:
    return tables_of(
        request.scheme, params, shape=request.shape, own_dtype=request.own_dtype, dtype=torch.float32
    ).contiguous()


class _TableCodes:
    """Codes of tables of blocks."""

    def __init__(self, request: Request) -> None:
        scheme, shape = request.scheme, request.shape
        self._request, self._rows, block = request, math.prod(shape[:-1]), scheme.row_block(shape)
        self._shape = packing.packed_shape(shape, scheme.bits)
        rows = TableRows(
            bits=scheme.bits,
            block=block,
            cols=shape[-1],
            width=-(-shape[-1] // block),
            row_bytes=self._shape[-1],
            kind=KINDS[request.dtype],
        )
        self._sizes = pack(rows)

    def hold(self, _: Params | None) -> str:
        return _ALLOCATES

    def _encoded(self, x: torch.Tensor, params: Params, data: torch.Tensor | None) -> torch.Tensor:
        require_parameters(self._request.scheme, params, self._request.shape)
        data = memory.empty(self._shape, torch.uint8) if data is None else data
        middles = flat_array(boundaries(_tables(self._request, params)))
        args = flat_array(x), self._sizes, middles, flat_bytes(data, math.prod(self._shape))
        if share(table_rows, args, self._rows, x.numel()) != k.OK:
            reference.require_finite(x)
        return data


class TableEncodeKernel(_TableCodes):
    """Codes under given tables."""

    def run(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._encoded(x, params, out)


class TableDynamicKernel(_TableCodes):
    """Tables of equal steps, and codes."""

    def run(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        scheme = self._request.scheme
        params = [*(self._tables_of(x) if extremes is None else reference.choose_params(x, scheme, extremes))]
        codes = self._encoded(x, params, None if out is None else out[0])
        return (codes, params) if out is None else filled(out, codes, params)

    def _tables_of(self, x: torch.Tensor) -> Params:
        scheme = self._request.scheme
        low, high = block_extremes(x, scheme.granularity, ranged=True)
        return arithmetic.scales_from_ranges(
            scheme, Ranges(minimum=(low,), maximum=(high,), dtype=x.dtype, shape=tuple(x.shape))
        )


class DigitsKernel:
    """Codes of several digits, from each digit's; single: their kernel."""

    def __init__(self, request: Request, single: Any) -> None:
        scheme, shape = request.scheme, request.shape
        element, digits = scheme.element, digits_of(scheme)
        assert isinstance(element, DigitsFormat)
        self._single, self._rows, self._count = single, math.prod(shape[:-1]), math.prod(shape)
        self._shape = code_rows.packed_shape(scheme, shape)
        zero = int(encode_codebook(torch.zeros(1, device="cpu"), element.digit))
        row = packing.packed_shape(shape, digits.bits)[-1]
        rows = DigitRows(
            bits=digits.bits,
            base=element.base,
            per=element.count,
            missing=zero,
            block=scheme.row_block(shape),
            cols=shape[-1],
            source_bytes=row,
            row_bytes=self._shape[-1],
        )
        self._sizes = pack(rows)

    def run(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        digits, params = self._single.run(x, None, extremes)
        data = memory.empty(self._shape, torch.uint8) if out is None else out[0]
        share(digit_rows, (flat_array(digits), self._sizes, flat_array(data)), self._rows, self._count)
        return (data, params) if out is None else filled(out, data, params)

    def hold(self, _: Params | None) -> str:
        return "digits are made in memory of each call"
