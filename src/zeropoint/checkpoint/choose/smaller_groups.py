"""Smaller groups for weights that the scheme's group does not divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...architectures import fused_set
from ...codecs.block_extents import blocks
from ...codecs.layer_schemes import named_layer
from ...codecs.protocol import LayerScheme
from ...codecs.tensor_fields import COLUMNS, ROWS
from ...errors import ZeropointError
from ...schemes import Granularity
from ..read.tensor_entries import TensorEntry
from .selection import module_of

SMALLEST = 32
"""The smallest group that is chosen: vLLM's GPU kernels (Marlin, Triton) take none below."""


def group_of(layer: LayerScheme) -> int:
    """Return the columns of a scheme's group; 0 for other blocks."""
    found = blocks(layer.weight)
    return found[COLUMNS] if found[ROWS] == 1 else 0


def _halved(layer: LayerScheme) -> LayerScheme | None:
    """Return a layer with half the group, or None, as for MX."""
    group = group_of(layer)
    if not group or group % 2 or len(layer.weight.levels) > 1:
        return None
    finest = replace(layer.weight.scales[0], granularity=Granularity.group(group // 2))
    try:
        return named_layer(layer.codec, replace(layer.weight, scales=(finest,)), layer.input)
    except ZeropointError:
        return None


def smaller(layer: LayerScheme) -> Iterator[LayerScheme]:
    """Yield a layer with repeatedly halved groups, down to SMALLEST."""
    half = _halved(layer)
    while half is not None and group_of(half) >= SMALLEST:
        yield half
        half = _halved(half)


class SmallerGroups:
    """Smaller groups of weights, one for each fused set.

    misfit: returns why the layout cannot hold a weight under a scheme, or None.
    """

    def __init__(self, misfit: Callable[[TensorEntry, LayerScheme], str | None]) -> None:
        self._misfit = misfit
        self._found: dict[tuple[str, LayerScheme], LayerScheme] = {}

    def add(self, entry: TensorEntry, layer: LayerScheme) -> None:
        """Choose the group of a weight for ``layer``."""
        if self._misfit(entry, layer) is None:
            return
        fitting = next((half for half in smaller(layer) if self._misfit(entry, half) is None), None)
        key = _set_of(entry), layer
        if fitting is not None and group_of(fitting) < group_of(self._found.get(key, layer)):
            self._found[key] = fitting

    def of(self, entry: TensorEntry, layer: LayerScheme) -> LayerScheme:
        """Return the layer with a weight's group, after all were added."""
        return self._found.get((_set_of(entry), layer), layer)


def _set_of(entry: TensorEntry) -> str:
    module = module_of(entry.name)
    return fused_set(module) or module


def why_none(layer: LayerScheme) -> str:
    """Return why no smaller group fits, or "" without groups."""
    if not group_of(layer):
        return ""
    if _halved(layer) is None:
        return ", and its format has no other group"
    return f", and no smaller group of at least {SMALLEST} divides it"
