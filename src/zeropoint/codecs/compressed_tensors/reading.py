"""Read the quantized layers of a checkpoint of compressed-tensors, each tensor checked."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...errors import CheckpointError
from ...formats import Format
from ...formats.torch_dtypes import format_of
from ...patterns import REGEX
from ...recipes import Activation
from ...schemes import Scheme
from ..block_extents import blocks
from ..protocol import LayerScheme
from ..records import Entry, Known, Listing, Reader, Record, model_dtype, needed, record_of
from ..safetensors_dtypes import TORCH_DTYPES
from .config import Group, Targets, read_config, read_input, weight_groups
from .layout import GLOBAL_SCALE, IN_BYTES, MX, PACKED, SCALE, SHAPE, WEIGHT, ZERO_POINT, Layout
from .older import G_IDX, OlderForm, fields_apart, stored_otherwise

if TYPE_CHECKING:
    from . import CompressedTensors

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
