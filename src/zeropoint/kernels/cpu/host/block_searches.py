"""The host side of llama.cpp's searches: tensors to arrays, threads over super-blocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ....errors import RangeError
from ....layout import code_rows
from ....ops import reference
from ....ops.ggml import block_types, super_blocks
from ....ops.ggml.block_columns import SUPER
from ....ops.ggml.searches import IMPORTANT
from ....ops.reference import require_finite
from ....ops.reference_backend import Codes, filled
from ....ops.registry import Request
from ....ops.threads import share
from ....params.tensors import Params, parameter_tensors
from ..least_error import plain
from ..least_error.extreme_scales import rounded_rows
from ..least_error.line_search import Tries
from ..least_error.minima import CLAMPED, NIBBLES, OVERLAID, MinimaKind, minima_rows
from ..least_error.plain import PlainKind
from ..least_error.signed import SignedKind, signed_rows
from ..machine.descriptor import OK
from ..machine.named_records import pack
from . import memory
from .arrays import NO_BYTES, NO_FLOATS, flat_array
from .views import KINDS

_MINIMA = {
    "q2_k": (super_blocks.Q2_K, NIBBLES),
    "q4_k": (super_blocks.Q4_K, OVERLAID),
    "q5_k": (super_blocks.Q5_K, CLAMPED),
}
_SIGNED = ("q3_k", "q6_k", "iq4_xs")
_PLAIN = {
    "q4_0": (plain.SYMMETRIC, 32, 8), "q5_0": (plain.SYMMETRIC, 32, 16), "q4_1": (plain.AFFINE, 32, 15),
    "q5_1": (plain.AFFINE, 32, 31), "q8_0": (plain.EIGHT_BITS, 32, 127), "tq2_0": (plain.TERNARY, 256, 1),
    "tq1_0": (plain.TERNARY, 256, 1),
    "mxfp4_e2m1": (plain.MXFP4, 32, 0), block_types.NVFP4: (plain.NVFP4, 16, 0),
    "iq4_nl": (plain.TABLE, 32, 0),
}  # fmt: skip
"""Kind, values of a block, and half of the codes or the largest."""
_BLOCK = 32
_NO_HALVES = np.zeros(1, np.uint16)
Call = tuple[Callable[..., int], tuple[Any, ...]]


def search_refusal(request: Request) -> str | None:
    """Return why the kernels do not search the request's codes, or None."""
    reason = block_types.refusal(request.scheme, request.shape)
    if reason is None and block_types.type_of(request.scheme) not in (*_MINIMA, *_SIGNED, *_PLAIN):
        return f"{block_types.type_of(request.scheme)} is searched by the reference"
    return reason


class SearchKernel:
    """Codes and parameters as llama.cpp has them."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def run(self, x: torch.Tensor, importance: torch.Tensor | None = None, out: Codes | None = None) -> Codes:
        """See :class:`zeropoint.ops.registry.Op`; out: memory for what is returned."""
        out = self.memory(x.dtype) if out is None else out
        self.fill(x, importance, out)
        return out

    def fill(self, x: torch.Tensor, importance: torch.Tensor | None, out: Codes) -> int:
        """Write codes and parameters; return the state of the kernel.

        It is OK where no scale or minimum of a type that needs no search is zero.
        """
        data, params = out
        name = block_types.type_of(self._request.scheme)
        state, rounded = int(OK), name in _PLAIN and _is_rounded(_PLAIN[name][0], importance)
        if x.numel() and name in _PLAIN:
            state = self._run_plain(x, importance, data, params)
        elif x.numel():
            weights = NO_FLOATS if importance is None else flat_array(importance.to(torch.float32))
            kernel, options = self._call(weighted=importance is not None)
            outputs = flat_array(data), *map(_integers, params)
            values = flat_array(x.detach().to(torch.float32))
            state = share(kernel, (values, weights, *options, *outputs), x.numel() // SUPER, x.numel())
        if state != OK:
            require_finite(x)
        if state != OK or not rounded:
            block_types.require_finite_scales(params, self._request.scheme)
        return state

    def memory(self, dtype: torch.dtype) -> Codes:
        """Memory for the codes and parameters of a tensor."""
        scheme, shape = self._request.scheme, self._request.shape
        made = parameter_tensors(scheme, shape, dtype)
        data = memory.empty(code_rows.packed_shape(scheme, tuple(shape)), torch.uint8)
        return data, [torch.empty(grid, dtype=stored) for grid, stored in made]

    def _run_plain(
        self, x: torch.Tensor, importance: torch.Tensor | None, data: torch.Tensor, params: Params
    ) -> int:
        """Quantize a type of one number or two; return the state."""
        name, bits = block_types.type_of(self._request.scheme), self._request.scheme.bits
        assert name is not None
        kind, size, top = _PLAIN[name]
        rounded = _is_rounded(kind, importance)
        weighted = not rounded and importance is not None and kind not in (plain.MXFP4, plain.NVFP4)
        weights = (
            flat_array(importance.to(torch.float32)) if weighted and importance is not None else NO_FLOATS
        )
        sizes = pack(
            PlainKind(kind=int(kind), size=size, top=top, bits=bits, columns=x.shape[-1], weighted=weighted)
        )
        levels = [*map(_integers, params)]
        if kind in (plain.MXFP4, plain.NVFP4):
            outputs = _NO_HALVES, _NO_HALVES, levels[0]
        else:
            outputs = levels[0], levels[1] if len(levels) > 1 else _NO_HALVES, NO_BYTES
        count = x.numel() // size
        if rounded:
            own = x.detach() if x.dtype in KINDS else x.detach().to(torch.float32)
            given = flat_array(own), KINDS[own.dtype], sizes, flat_array(data), *outputs
            return share(rounded_rows, given, count, x.numel())
        rows = x.detach().to(torch.float32).reshape(-1, x.shape[-1])
        means = _row_means(rows) if weighted and kind != plain.TABLE else NO_FLOATS
        args = flat_array(rows), weights, means, sizes, flat_array(data).view(np.uint32), *outputs
        return share(plain.plain_rows, args, count, x.numel())

    def _call(self, *, weighted: bool) -> Call:
        """Return the kernel for the type, and its options."""
        name = block_types.type_of(self._request.scheme)
        assert name is not None
        columns, bits = self._request.shape[-1], self._request.scheme.bits
        if name in _SIGNED:
            return signed_rows, (pack(SignedKind(bits=bits, columns=columns, weighted=weighted)),)
        kind, stored = _MINIMA[name]
        line = IMPORTANT._replace(top=kind.line.top) if weighted else kind.line
        tries = Tries(
            top=line.top, first=line.first, step=line.step, steps=line.steps, magnitudes=line.magnitudes
        )
        found = MinimaKind(
            size=kind.size,
            line=tries,
            top=kind.top,
            factor=kind.factor,
            stored=int(stored),
            columns=columns,
            weighted=weighted,
            bits=bits,
        )
        return minima_rows, (pack(found),)


def _is_rounded(kind: Any, importance: torch.Tensor | None) -> bool:
    """Whether scales follow from extremes, so that nothing is searched."""
    return bool(kind in (plain.EIGHT_BITS, plain.TERNARY)) or (
        importance is None and kind in (plain.SYMMETRIC, plain.AFFINE)
    )


def _row_means(rows: torch.Tensor) -> Any:
    """Mean square of each row, squares added in order in float32."""
    count, columns = rows.shape
    sums = np.empty(count, np.float32)
    share(plain.square_rows, (flat_array(rows), np.uint64(columns), sums), count, rows.numel())
    return sums / np.float32(columns)


def _integers(levels: torch.Tensor) -> Any:
    """Numbers of a level as bytes, or as bits of float16."""
    array = flat_array(levels)
    return array.view(np.uint16) if levels.dtype is torch.float16 else array


class RoundedBlocksKernel:
    """Parameters and codes of blocks of types that need no search.

    The bytes are the reference's wherever no number of a block is zero as it is stored. The reciprocal of a
    scale that is may be infinite, and of minima of both signs llama.cpp takes the first; the reference rounds
    such blocks.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._search = request, SearchKernel(request)

    def run(
        self, x: torch.Tensor, out: Codes | None = None, extremes: tuple[float, float] | None = None
    ) -> Codes:
        """See :class:`zeropoint.ops.registry.Op`; what the kernels refuse, the reference names."""
        scheme, state = self._request.scheme, None
        data, params = own = self._search.memory(x.dtype) if out is None else out
        if extremes is None:
            with contextlib.suppress(RangeError):
                state = self._search.fill(x, None, own)
        if state is None:
            return filled(own, *reference.quantize_dynamic(x, scheme, extremes))
        if state != OK:
            zero = functools.reduce(torch.bitwise_or, ((level == 0).reshape(-1) for level in params))
            codes, stored = reference.quantize_dynamic(x.detach().reshape(-1, _BLOCK)[zero], scheme)
            data.view(-1, codes.shape[-1])[zero] = codes
            for level, numbers in zip(params, stored, strict=True):
                level.view(-1)[zero] = numbers.view(-1)
        return own

    def hold(self, _: Params | None) -> str:
        return "blocks of llama.cpp's types are rounded in memory of each call"
