"""The codec of compressed-tensors, which llm-compressor writes; its layouts are in layout.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...formats import format_name
from ...params import QuantizationParams
from ...recipes import Activation
from ...schemes import Granularity, Scheme, ZeroPoint
from ...tensor import QuantizedTensor
from .. import layer_schemes
from ..block_extents import blocks
from ..data_scales import CACHE_FORMAT, CacheScales, InputNames
from ..protocol import COLUMNS, ROWS, Codec, Contents, Documents, LayerScheme, TensorSpec
from ..records import Listing
from . import layout as layouts
from . import older
from .config import DIALECT, NAMES, QUANT_METHOD, input_arguments
from .config_groups import described, section
from .engine_rules import RULES
from .layout import IN_BYTES, SCALE, WEIGHT, WORD_BITS, Layout
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

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
        found = self._layout(layer)
        if layer.input is not None:
            input_arguments(layer.input)
        return found.value + self.form.words

    def _layout(self, layer: LayerScheme) -> Layout:
        given = None if layer.input is None else layer.input.scheme
        return self.form.layout or layouts.layout_of(layer.weight, given)

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`."""
        return layouts.unfit(layer.weight, self._layout(layer), shape)

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        """See :class:`Codec`."""
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
        """See :class:`Codec`."""
        return self._layout(layer) is Layout.NVFP4

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        """See :class:`Codec`."""
        rows = layouts.row_alignment(layer.weight)
        return older.row_alignment(layer.weight, self.form, rows)

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        specs = layouts.tensor_specs(layer.weight, self._layout(layer), shape, dtype)
        return older.tensor_specs(specs, layer.weight, self.form, shape)

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        return layouts.encode_part(self._layout(layer), q)

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        return layouts.encode_constants(self._layout(layer), params, shape)

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`; rows inside a block take the block's scale."""
        found = older.renewed(tensors, layer.weight, self.form, shape)
        q = decode_rows(self._layout(layer), found, layer.weight, start, shape=shape, dtype=dtype)
        return older.by_group_index(q, tensors[older.G_IDX]) if self.form.indexed else q

    def group_index(self, layer: LayerScheme) -> str | None:
        """See :class:`~zeropoint.codecs.act_order.ActOrder`."""
        return older.G_IDX if self.form.indexed else None

    def out_of_order(self, layer: LayerScheme) -> LayerScheme | None:
        """See :class:`~zeropoint.codecs.act_order.ActOrder`: packed integers in groups alone."""
        if self._layout(layer) is not Layout.PACK or not blocks(layer.weight)[COLUMNS]:
            return None
        return replace(layer, codec=replace(self, form=replace(self.form, indexed=True)))

    def damage(self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """See :class:`Codec`; scales of nvfp4 have no sign for engines."""
        negative = self._layout(layer) is Layout.NVFP4 and bool(torch.signbit(tensors[SCALE].float()).any())
        return "a scale is negative" if negative else None

    def read(self, listing: Listing) -> CompressedTensorsReader:
        """See :class:`Codec`."""
        return CompressedTensorsReader(listing, self)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`."""
        return Documents(section=section(contents))

    def with_cache(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`Codec`; transformers has no cache where it decodes weights."""
        cache = Activation.of(f"{format_name(CACHE_FORMAT)}:tensor", dynamic=False)
        kept = {key: value for key, value in document.items() if key != "dequantize"}
        return {**kept, "kv_cache_scheme": input_arguments(cache)}

    def describe(
        self, modules: Mapping[LayerScheme, Sequence[str]], kept: Sequence[str]
    ) -> Mapping[str, Any]:
        """See :class:`Codec`."""
        return described(modules, kept)

    def keeps(self, quantization: Mapping[str, Any]) -> bool:
        """See :class:`Codec`."""
        return self.claims(quantization)


def decode_rows(
    layout: Layout, tensors: Mapping[str, torch.Tensor], weight: Scheme, start: int, *, shape: tuple[int,
    ...], dtype: torch.dtype,
) -> QuantizedTensor:  # fmt: skip
    """Return rows from ``start`` on, possibly from inside a block."""
    height = blocks(weight)[0]
    if height > 1 and start % height:
        rows = torch.arange(start % height, start % height + shape[0]) // height
        tensors = {**tensors, SCALE: tensors[SCALE].view(torch.uint8)[rows].view(tensors[SCALE].dtype)}
        by_row = Granularity.group(blocks(weight)[COLUMNS])
        weight = replace(weight, scales=(replace(weight.scales[0], granularity=by_row),))
    return layouts.decode(layout, tensors, weight, shape=shape, dtype=dtype)


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
