"""ggml types by their schemes, and quantization to llama.cpp's codes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...errors import RangeError
from ...layout import code_rows, packing
from ...params.effective import span
from ...params.tensors import Params, parameter_tensors
from ...schemes import Scheme
from ...schemes.scale_rules import Linear, Pick, Store
from ..reference import require_finite
from . import plain_blocks, super_blocks, table_blocks
from .block_columns import Importance, Stored

_PIECE = 1 << 18
"""Values that are searched at once; each takes some 100 bytes."""


NVFP4 = "float4_e2m1fn:g16:scale=float8_ue4m3fn:dialect=ggml"
"""NVFP4 without a scale of the tensor, which has no preset."""


class BlockSearch(NamedTuple):
    """How one type is quantized.

    block: values in a block. search: see :mod:`.block_columns`. rounds_last: whether codes are the closest
    under the scales as they are stored.
    """

    block: int
    search: Callable[[torch.Tensor, Importance], Stored]
    rounds_last: bool = True


_OF = MappingProxyType(
    {
        "q4_0": BlockSearch(32, partial(plain_blocks.symmetric, top=8), rounds_last=False),
        "q4_1": BlockSearch(32, partial(plain_blocks.affine, top=15), rounds_last=False),
        "q5_0": BlockSearch(32, partial(plain_blocks.symmetric, top=16), rounds_last=False),
        "q5_1": BlockSearch(32, partial(plain_blocks.affine, top=31), rounds_last=False),
        "q8_0": BlockSearch(32, plain_blocks.eight_bits),
        "tq1_0": BlockSearch(256, plain_blocks.ternary),
        "tq2_0": BlockSearch(256, plain_blocks.ternary),
        "q2_0": BlockSearch(64, partial(plain_blocks.ternary, block=64)),
        "q2_k": BlockSearch(256, partial(super_blocks.with_minima, kind=super_blocks.Q2_K)),
        "q3_k": BlockSearch(256, super_blocks.three_bits),
        "q4_k": BlockSearch(256, partial(super_blocks.with_minima, kind=super_blocks.Q4_K)),
        "q5_k": BlockSearch(256, partial(super_blocks.with_minima, kind=super_blocks.Q5_K)),
        "q6_k": BlockSearch(256, super_blocks.six_bits),
        "iq4_nl": BlockSearch(32, table_blocks.nonlinear, rounds_last=False),
        "iq4_xs": BlockSearch(256, table_blocks.nonlinear_super, rounds_last=False),
        "mxfp4_e2m1": BlockSearch(32, table_blocks.microscaling),
        NVFP4: BlockSearch(64, table_blocks.nvfp4),
    }
)
"""By the text of a scheme of the type."""


@functools.cache
def _by_structure() -> dict[object, str]:
    return {Scheme.parse(text).structure: text for text in _OF}


@functools.lru_cache(maxsize=256)
def type_of(scheme: Scheme) -> str | None:
    """Return the scheme text of the type that stores ``scheme``, or None.

    Numbers of both signs, and those that are rounded after the elements, are in both or in neither.
    """
    name = _by_structure().get(scheme.structure)
    if name is None or _rules(scheme) != _rules(Scheme.parse(name)):
        return None
    return name


def _rules(scheme: Scheme) -> list[tuple[bool, bool] | None]:
    rules = (level.rule for level in scheme.levels)
    return [(r.pick is Pick.SIGNED, r.store is Store.LATE) if isinstance(r, Linear) else None for r in rules]


def rounds_last(scheme: Scheme) -> bool:
    """Return whether a type's codes are closest under its stored scales."""
    name = type_of(scheme)
    return name is not None and _OF[name].rounds_last


def refusal(scheme: Scheme, shape: tuple[int, ...]) -> str | None:
    """Return the reason why llama.cpp has no codes, or None."""
    name = type_of(scheme)
    if name is None:
        return f"{scheme} is no type of ggml"
    columns, block = packing.row_length(shape), _OF[name].block
    return (
        f"last axis {columns} is not a multiple of the block of {name}, {block}" if columns % block else None
    )


def search(x: torch.Tensor, scheme: Scheme, importance: Importance = None) -> tuple[torch.Tensor, Params]:
    """Return packed codes and parameters of ``x``, which :func:`refusal` does not refuse.

    x: floats (..., columns), rounded to float32 first. scheme: of a type of ggml. importance: (columns,),
    weights of squared errors, or None. Raises NonFiniteError for NaN and Inf; RangeError where llama.cpp
    would write a scale of Inf.
    """
    require_finite(x)
    shape, name = tuple(x.shape), type_of(scheme)
    assert name is not None
    rows = x.detach().reshape(-1, packing.row_length(shape)).float()
    weights = None if importance is None else importance.to(rows)
    step = max(1, _PIECE // max(1, rows.shape[1]))
    parts = [_OF[name].search(part, weights) for part in torch.split(rows, step)] if rows.numel() else []
    made = parameter_tensors(scheme, shape, x.dtype)
    if not parts:
        return x.new_empty(code_rows.packed_shape(scheme, shape), dtype=torch.uint8), [
            x.new_empty(grid, dtype=dtype) for grid, dtype in made
        ]
    data = code_rows.pack_digits(torch.cat([codes for codes, _ in parts]), scheme)
    params = [
        torch.cat(levels).view(dtype).view(grid)
        for (grid, dtype), *levels in zip(made, *(levels for _, levels in parts), strict=True)
    ]
    require_finite_scales(params, scheme)
    return data.view(code_rows.packed_shape(scheme, shape)), params


def require_range(x: torch.Tensor, scheme: Scheme) -> None:
    """Raise RangeError for twice the type's largest number: llama.cpp zeroes such blocks.

    Squares of such numbers overflow in its searches; types with scales past float16 hold all of float32.
    """
    finest = scheme.scales[-1].format
    if x.numel() == 0 or finest is None or not finest.has_inf:
        return
    held = span(scheme.scales, finest) * max(map(abs, scheme.ends))
    largest = float(torch.linalg.vector_norm(x, math.inf))
    if largest > 2 * held:
        raise RangeError(
            f"the weight holds {largest:g}, and {type_of(scheme)} at most {held:g}; keep the weight, or "
            "scale it down"
        )


def require_finite_scales(params: Params, scheme: Scheme) -> None:
    """Raise RangeError where a number of a level is not finite."""
    for level, numbers in zip(scheme.levels, params, strict=True):
        if numbers.is_floating_point() and not _all_finite(numbers):
            raise RangeError(
                f"a block of the weight needs a scale or offset past {level}, where llama.cpp writes one "
                "that is not finite; keep the weight, or scale it down"
            )


def _all_finite(numbers: torch.Tensor) -> bool:
    """Return whether all numbers are finite; float16 by its bits, faster."""
    if numbers.dtype is not torch.float16 or not numbers.numel():
        return bool(numbers.float().isfinite().all())
    return int((numbers.view(torch.int16) & _HALF_EXPONENT).max()) < _HALF_EXPONENT


_HALF_EXPONENT = 0x7C00
