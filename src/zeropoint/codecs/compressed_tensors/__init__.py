"""The codec of compressed-tensors, which llm-compressor writes; its layouts are in layout.py."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...errors import CheckpointError
from ...formats import Format, format_name
from ...formats.torch_dtypes import format_of
from ...patterns import REGEX
from ...recipes import Activation
from ...schemes import Scheme, ZeroPoint
from ...tensor import QuantizedTensor
from .. import layer_schemes
from ..block_extents import blocks
from ..containers.safetensors import TORCH_DTYPES
from ..data_scales import CACHE_FORMAT, CacheScales, InputNames
from ..protocol import Codec, Contents, Documents, LayerScheme
from ..records import Entry, Known, Listing, Reader, Record, model_dtype, needed, record_of
from ..tensor_fields import COLUMNS, ROWS, Field, Tensors, TensorSpec, WeightPart, decoded, rows_of_blocks
from . import layout as layouts
from . import older
from .config import (
    DIALECT,
    NAMES,
    QUANT_METHOD,
    Group,
    Targets,
    input_arguments,
    read_config,
    read_input,
    weight_groups,
)
from .config_groups import described, section
from .engine_rules import RULES
from .layout import (
    FLOAT8,
    GLOBAL_SCALE,
    IN_BYTES,
    MX,
    PACKED,
    SCALE,
    SHAPE,
    WEIGHT,
    WORD_BITS,
    ZERO_POINT,
    Layout,
)
from .older import G_IDX, NEWEST, OlderForm, fields_apart, stored_otherwise

OWN = (PACKED, SCALE, ZERO_POINT, SHAPE, GLOBAL_SCALE, G_IDX)
"""Last parts of names that make a module a quantized one."""
_SCALE_DTYPES = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "U8")
_MICROSCALED = (*MX, Layout.NVFP4)


class CompressedTensorsReader(Reader):
    """The groups of one ``quantization_config``, and the layers that they name."""

    def __init__(self, listing: Listing, codec: CompressedTensors) -> None:
        self._listing = listing
        self._codec = codec
        self.groups, self.ignore = read_config(listing.quantization, codec)
        self._named = [(group, Targets(group.targets)) for group in self.groups]
        self._ignored = Targets(self.ignore)

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        scale = tensors.get(SCALE)
        if scale is not None and scale.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"weight_scale is {scale.dtype}, but must be one of {', '.join(_SCALE_DTYPES)}"
            )
        if self._ignored.match(key):
            raise CheckpointError(
                "it is quantized, but the configuration ignores it, so loaders would not find it"
            )
        group = next((g for g, named in self._named if named.match(key, linear=True)), None)
        if group is None:
            raise CheckpointError("it is quantized, but no group of the configuration names it")
        layout, layer = Layout(group.layer.layout), group.layer
        shape = known.shape if known else self._shape(tensors, layout, layer.weight)
        dtype = known.dtype if known else self._dtype(tensors, layout)
        weight = _with_scale_format(layer.weight, layout, dtype, tensors)
        codec = replace(self._codec, form=self._form(group, tensors, shape))
        layer = LayerScheme(codec=codec, name=str(weight), weight=weight, input=layer.input)
        record = record_of(layer, key, tensors, Known(shape, dtype))
        if SHAPE in tensors and self._read_shape(tensors[SHAPE]) != shape:
            found = list(self._read_shape(tensors[SHAPE]))
            raise CheckpointError(f"weight_shape says {found}, but the weight has shape {list(shape)}")
        return record

    def _form(self, group: Group, tensors: Mapping[str, Entry], shape: tuple[int, int]) -> OlderForm:
        """Return the form of a layer; raises CheckpointError for wrong ``weight_g_idx``."""
        layout, weight = Layout(group.layer.layout), group.layer.weight
        packed = tensors.get(PACKED)
        width = packed.shape[-1] if packed is not None and packed.shape else 0
        if G_IDX in tensors:
            self._require_groups(tensors[G_IDX], group, shape[1])
        return OlderForm(
            layout=layout if stored_otherwise(layout, weight) else None,
            apart=weight.element.is_integer and fields_apart(layout, weight.bits, width, shape[1]),
            indexed=G_IDX in tensors and weight.element.is_integer,
        )

    def _require_groups(self, entry: Entry, group: Group, columns: int) -> None:
        """Raise CheckpointError for absent groups, or act-order without its flag."""
        if (entry.dtype, entry.shape) != ("I32", (columns,)):
            raise CheckpointError(
                f"{G_IDX} is {entry.dtype} of shape {list(entry.shape)}, but must be I32 of [{columns}]"
            )
        found = torch.frombuffer(bytearray(self._listing.read(entry)), dtype=torch.int32)
        own = torch.arange(columns) // (blocks(group.layer.weight)[1] or columns)
        low, high = (int(extreme) for extreme in torch.aminmax(found))
        if low < -1 or high > int(own[-1]):
            raise CheckpointError(f"{G_IDX} has groups {low} to {high}, but there are 0 to {int(own[-1])}")
        if low >= 0 and not torch.equal(found, own.int()) and not group.act_order:
            raise CheckpointError(
                f"its {G_IDX} puts columns into groups out of order, but actorder of the configuration does "
                "not say so; correct it"
            )

    def kept(self) -> Callable[[str], bool]:
        return lambda _: False

    def expects(self, module: str) -> bool:
        return not self._ignored.match(module) and any(
            named.match(module, linear=True) for _, named in self._named
        )

    def named(self) -> Iterable[str]:
        every = dict.fromkeys(target for group in self.groups for target in group.targets)
        return (target for target in every if "." in target and not target.startswith(REGEX))

    def input_of(self, module: str) -> Activation | None:
        entries = weight_groups(self._listing.quantization)
        return next(
            read_input(entry.get("input_activations"))
            for entry, (_, named) in zip(entries, self._named, strict=True)
            if named.match(module, linear=True)
        )

    def _shape(self, tensors: Mapping[str, Entry], layout: Layout, weight: Scheme) -> tuple[int, int]:
        if layout is Layout.PACK:
            return self._read_shape(needed(tensors, SHAPE, layout.value))
        packed = layout in IN_BYTES
        entry = tensors.get(PACKED if packed else WEIGHT)
        if entry is None or len(entry.shape) != 2:
            raise CheckpointError(f"its codes are missing or no matrix, which {layout.value} needs")
        return entry.shape[0], entry.shape[1] * 8 // weight.bits if packed else entry.shape[1]

    def _read_shape(self, entry: Entry) -> tuple[int, int]:
        if entry.dtype != "I64" or entry.shape != (2,):
            raise CheckpointError(
                f"weight_shape is {entry.dtype} of shape {list(entry.shape)}, but must be I64 of [2]"
            )
        rows, columns = struct.unpack("<2q", self._listing.read(entry))
        return rows, columns

    def _dtype(self, tensors: Mapping[str, Entry], layout: Layout) -> torch.dtype:
        """Return the likely dtype of a weight: linear scales', else the model's."""
        scale = tensors.get(SCALE)
        if layout not in _MICROSCALED and scale is not None:
            return TORCH_DTYPES.get(scale.dtype, torch.float32)
        return model_dtype(self._listing.config, torch.float32)


def _with_scale_format(
    weight: Scheme, layout: Layout, dtype: torch.dtype, tensors: Mapping[str, Entry]
) -> Scheme:
    """Return the scheme with the file's scale format, where open."""
    entry = tensors.get(SCALE)
    if layout in _MICROSCALED or entry is None:
        return weight
    found = TORCH_DTYPES.get(entry.dtype)
    fmt: Format | None = None if found is None or found == dtype else format_of(found)
    return replace(weight, scales=(replace(weight.scales[0], format=fmt),))


@dataclass(frozen=True)
class CompressedTensors(Codec):
    """See the module and :class:`Codec`.

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
        return older.by_group_index(q, tensors[G_IDX]) if self.form.indexed else q

    def group_index(self, layer: LayerScheme) -> str | None:
        return G_IDX if self.form.indexed else None

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
