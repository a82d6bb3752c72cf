"""Tensor parallelism: which quantized weights an engine can divide among several devices.

Layers that take the hidden state are cut by rows, and those that give it back by columns, as Megatron-LM does
(https://arxiv.org/abs/1909.08053, section 3); the sum over devices follows the latter. Each device must hold
whole groups with their scales, and whole words of packed codes and zero points, or it cannot load its part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from ...architectures import split_by_columns
from ...codecs.protocol import LayerScheme
from ...codecs.tensor_fields import COLUMNS, ROWS
from .placement import Placement

WAYS = (1, 2, 4, 8)
"""Numbers of devices that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indivisible:
    """A weight that cannot be cut into ``ways`` parts, and why."""

    module: str
    ways: int
    reason: str


def indivisible(weights: Iterable[Placement]) -> tuple[Indivisible, ...]:
    """Return each weight and device count that do not divide it."""
    return tuple(
        Indivisible(module=weight.module, ways=ways, reason=reason)
        for ways in WAYS
        for weight in weights
        if (reason := problem(weight.layer, weight.shape, ways, by_columns=split_by_columns(weight.module)))
    )


@functools.lru_cache(maxsize=4096)
def problem(layer: LayerScheme, shape: tuple[int, int], ways: int, *, by_columns: bool) -> str | None:
    """Return why a weight cannot be cut into ``ways`` parts, or None.

    >>> from zeropoint.codecs.layer_schemes import layer_scheme
    >>> from zeropoint.codecs.registry import DEFAULT
    >>> problem(layer_scheme("w4a16", DEFAULT), (4096, 11008), 4, by_columns=True)
    '11008 columns / 4 = 2752, not a multiple of the group, 128'
    """
    extent, noun = (shape[1], "columns") if by_columns else (shape[0], "rows")
    if extent % ways:
        return f"{extent} {noun} cannot be split into {ways}"
    part = extent // ways
    for multiple, what in layer.codec.multiples(layer, COLUMNS if by_columns else ROWS):
        # One device holds all, with whatever stands over at the end.
        if part % multiple and ways > 1:
            return f"{extent} {noun} / {ways} = {part}, not a multiple of {what}, {multiple}"
    return None
