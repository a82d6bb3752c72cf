"""The codec of compressed-tensors, which llm-compressor writes; its layouts are in layout.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...formats import format_name
from ...recipes import Activation
from ...schemes import ZeroPoint
from ...tensor import QuantizedTensor
from .. import layer_schemes
from ..block_extents import blocks
from ..data_scales import CACHE_FORMAT, CacheScales, InputNames
from ..protocol import Codec, Contents, Documents, LayerScheme
from ..tensor_fields import (
    COLUMNS,
    ROWS,
    Field,
    Tensors,
    TensorSpec,
    WeightPart,
    decoded,
    rows_of_blocks,
)
from . import layout as layouts
from . import older
from .config import DIALECT, NAMES, QUANT_METHOD, input_arguments
from .config_groups import described, section
from .engine_rules import RULES
from .layout import FLOAT8, IN_BYTES, SCALE, WEIGHT, WORD_BITS, Layout
from .older import NEWEST, OlderForm
from .reading import OWN, CompressedTensorsReader


@dataclass(frozen=True)
class CompressedTensors(Codec):
    """See the module and :class:`Codec`.

    Args:
        form: of the tensors of a weight in somebody's file.
    """

    form: OlderForm = NEWEST

    name = "compressed-tensors"
    title = "the layouts of compressed-tensors"
    presets = NAMES
    candidates = ("w4a16", "nvfp4a16", "mxfp4a16", "mxfp8a16", "w8a16")
    defaults = MappingProxyType({"scale": "input", "dialect": DIALECT})
    input_names = InputNames("input_scale", "input_zero_point", "input_global_scale")
    cache = CacheScales("k_scale", "v_scale", shape=(1,), dtype=None)
    parts = MappingProxyType({**dict.fromkeys(OWN, True), WEIGHT: False})
    negative_scales = True
    engines = RULES
    methods = (QUANT_METHOD,)
    reader = CompressedTensorsReader
    keeps_codes = True
    divisible = FLOAT8

    def layout(self, layer: LayerScheme) -> str:
        found = self._layout(layer)
        if layer.input is not None:
            input_arguments(layer.input)
        return found.value + self.form.words

    def _layout(self, layer: LayerScheme) -> Layout:
        given = None if layer.input is None else layer.input.scheme
        return self.form.layout or layouts.layout_of(layer.weight, given)

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        return layouts.unfit(layer.weight, self._layout(layer), shape)

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        rows, columns = blocks(layer.weight)
        layout, bits = self._layout(layer), layer.weight.bits
        if axis == ROWS:
            found = [(rows or 1, "the block")]
            if layer.weight.zero_point is not ZeroPoint.NONE:
                found.append((_codes_of_whole_words(bits), "the zero points that fill whole words"))
            return found
        found = [(columns or 1, "the group" if rows == 1 else "the block")]
        if layout in IN_BYTES:
            found.append((2, "the codes in a byte"))
        if layout is Layout.PACK:
            found.append((_codes_of_whole_words(bits), "the codes that fill whole words"))
        return found

    def shares_scale(self, layer: LayerScheme) -> bool:
        return self._layout(layer) is Layout.NVFP4

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        return layouts.fields_of(layer.weight, self._layout(layer))

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        return older.tensor_specs(super().tensors(layer, shape, dtype), layer.weight, self.form, shape)

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        """See :class:`Codec`; raises CheckpointError for tensors of other shapes."""
        found = older.renewed(tensors, layer.weight, self.form, part.shape)
        found, weight = rows_of_blocks(found, SCALE, layer.weight, part)
        layouts.require_stored(weight, self._layout(layer), found, part)
        q = decoded(self.fields(layer), found, weight, part)
        return older.by_group_index(q, tensors[older.G_IDX]) if self.form.indexed else q

    def group_index(self, layer: LayerScheme) -> str | None:
        return older.G_IDX if self.form.indexed else None

    def out_of_order(self, layer: LayerScheme) -> LayerScheme | None:
        """See :class:`~zeropoint.codecs.act_order.ActOrder`: packed integers in groups alone."""
        if self._layout(layer) is not Layout.PACK or not blocks(layer.weight)[COLUMNS]:
            return None
        return replace(layer, codec=replace(self, form=replace(self.form, indexed=True)))

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        """See :class:`Codec`; scales of nvfp4 have no sign for engines."""
        negative = self._layout(layer) is Layout.NVFP4 and bool(torch.signbit(tensors[SCALE].float()).any())
        return "a scale is negative" if negative else None

    def documents(self, contents: Contents) -> Documents:
        return Documents(section=section(contents))

    def with_cache(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`Codec`; transformers has no cache where it decodes weights."""
        cache = Activation.of(f"{format_name(CACHE_FORMAT)}:tensor", dynamic=False)
        kept = {key: value for key, value in document.items() if key != "dequantize"}
        return {**kept, "kv_cache_scheme": input_arguments(cache)}

    def describe(
        self, modules: Mapping[LayerScheme, Sequence[str]], kept: Sequence[str]
    ) -> Mapping[str, Any]:
        return described(modules, kept)


def _codes_of_whole_words(bits: int) -> int:
    """Return the fewest codes of ``bits`` bits that fill whole words.

    >>> [_codes_of_whole_words(bits) for bits in (2, 3, 4, 6, 8)]
    [16, 32, 8, 16, 4]
    """
    return WORD_BITS // (bits & -bits)


CODEC = CompressedTensors()


def layer_scheme(text: str | LayerScheme) -> LayerScheme:
    """Return this codec's layer scheme; see :func:`zeropoint.codecs.layer_schemes.layer_scheme`.

    >>> str(layer_scheme("int4:g64").weight)
    'int4:g64:scale=input:dialect=compressed-tensors'
    >>> layer_scheme("w8a8").layout
    'int-quantized'
    """
    return layer_schemes.layer_scheme(text, CODEC)
