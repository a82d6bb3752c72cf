"""Tensor parallelism: which quantized weights an engine can divide among several devices.

Layers that take the hidden state are cut by rows, and those that give it back by columns, as Megatron-LM does
(https://arxiv.org/abs/1909.08053, section 3); the sum over devices follows the latter. Each device must hold
whole groups with their scales, and whole words of packed codes and zero points, or it cannot load its part.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..codecs.compressed_tensors import WORD_BITS, Layout, blocks
from ..codecs.compressed_tensors_config import LayerScheme
from ..schemes import ZeroPoint
from .placement import Weight

WAYS = (1, 2, 4, 8)
"""Numbers of devices that are looked at."""

# The last part of names of layers whose columns are cut: attention's output and the end of an MLP, in the
# spelling of transformers' models (their base_model_tp_plan says "rowwise" of these).
_BY_COLUMNS = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|c_proj|fc2|w2|wo|dense_4h_to_h|attention\.dense|output\.dense|out_lin|lin2)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indivisible:
    """A weight that cannot be cut into ``ways`` parts, and why."""

    module: str
    ways: int
    reason: str


def indivisible(weights: Iterable[Weight]) -> tuple[Indivisible, ...]:
    """Return each weight that some number of devices cannot share, once for each such number."""
    return tuple(
        Indivisible(module=weight.module, ways=ways, reason=reason)
        for ways in WAYS
        for weight in weights
        if (reason := problem(weight.layer, weight.shape, ways, by_columns=by_columns(weight.module)))
    )


def by_columns(module: str) -> bool:
    """Return whether engines cut the columns of a layer, rather than its rows.

    >>> by_columns("model.layers.0.mlp.down_proj"), by_columns("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return _BY_COLUMNS.search(module) is not None


@functools.lru_cache(maxsize=4096)
def problem(layer: LayerScheme, shape: tuple[int, int], ways: int, *, by_columns: bool) -> str | None:
    """Return why a weight cannot be cut into ``ways`` equal parts along one axis, or None when it can.

    >>> from zeropoint.codecs.compressed_tensors_config import layer_scheme
    >>> problem(layer_scheme("w4a16"), (4096, 11008), 4, by_columns=True)
    '11008 columns / 4 = 2752, not a multiple of the group, 128'
    """
    extent, noun = (shape[1], "columns") if by_columns else (shape[0], "rows")
    if extent % ways:
        return f"{extent} {noun} cannot be split into {ways}"
    part = extent // ways
    for multiple, what in _multiples(layer, by_columns=by_columns):
        # One device holds all, with whatever stands over at the end.
        if part % multiple and ways > 1:
            return f"{extent} {noun} / {ways} = {part}, not a multiple of {what}, {multiple}"
    return None


def _multiples(layer: LayerScheme, *, by_columns: bool) -> list[tuple[int, str]]:
    """Return what the length of a part must be a multiple of."""
    rows, columns = blocks(layer.weight)
    found = (
        [(columns or 1, "the group" if rows == 1 else "the block")]
        if by_columns
        else [(rows or 1, "the block")]
    )
    bits = layer.weight.bits
    if layer.layout in (Layout.MXFP4, Layout.NVFP4) and by_columns:
        found.append((2, "the codes in a byte"))
    if layer.layout is Layout.PACK and by_columns:
        found.append((_codes_of_whole_words(bits), "the codes that fill whole words"))
    if layer.weight.zero_point is not ZeroPoint.NONE and not by_columns:
        found.append((_codes_of_whole_words(bits), "the zero points that fill whole words"))
    return found


def _codes_of_whole_words(bits: int) -> int:
    """Return the least number of codes of ``bits`` bits that end where a word ends.

    >>> [_codes_of_whole_words(bits) for bits in (2, 3, 4, 6, 8)]
    [16, 32, 8, 16, 4]
    """
    return WORD_BITS // (bits & -bits)
