"""A checkpoint seen as floats: one float tensor for each quantized layer.

Such a tensor has a name, a dtype and a shape, and lies in no file. Everything that plans with names and
shapes works on this view; readers give the rows (row_reader.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...architectures import expert_layout, is_transposed
from ...codecs.containers.safetensors import FILE_DTYPES
from ...codecs.known import ACTIVATION_SCALES, CONFIG_KEYS, TOOL_FILES
from ...codecs.protocol import Codec
from ...codecs.records import Reader
from ...codecs.stored_forms import OMITTED
from ...errors import CheckpointError, UnsupportedError
from ...recipes import Activation
from ..read.config_text import WEIGHTS_ONLY_CONFIG, without_keys
from ..read.quantized_layers import StoredLayer, StoredLayers, configuration, find_layers
from ..read.source import Source
from ..read.storage import shown
from ..read.tensor_entries import Entries, TensorEntry
from .decoded import Decoded
from .gathered import in_pieces
from .row_changes import Transposed, in_model_form
from .row_reader import RowReader, StoredFloats
from .selection import module_of, require_unquantized
from .tensor_matrices import has_one_scale_each, with_axes

_LISTED = 10

_OF_QUANTIZATION = frozenset((WEIGHTS_ONLY_CONFIG, *TOOL_FILES))
"""Files that say how a checkpoint is quantized, which its floats are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floats:
    """A checkpoint seen as if it were not quantized.

    source: with one tensor of floats for each quantized layer, and no configuration of quantization. readers:
    by name, of what it holds as codes. config: what its configuration said of quantization, or None.
    config_reader: what its codec reads there, or None.
    """

    source: Source
    readers: Mapping[str, RowReader]
    config: Mapping[str, Any] | None
    config_reader: Reader | None = None

    def quantized(self, name: str) -> tuple[StoredLayer, Activation | None] | None:
        """Return a tensor's quantized layer and its input quantization, or None."""
        found = self.readers.get(name)
        if found is None or found.layer is None or self.config_reader is None:
            return None
        return found.layer, self.config_reader.input_of(found.layer.module)

    def reader(self, entry: TensorEntry) -> RowReader:
        """Return the reader of one of its tensors."""
        found = self.readers.get(entry.name)
        if found is not None:
            return found
        if entry.use is not None and entry.use.transposed:
            entry = replace(entry, shape=entry.shape[::-1])
        elif not (entry.inputs_first or (entry.stack is not None and entry.stack.transposed)):
            return in_model_form(StoredFloats(entry=entry))
        return Transposed(entry=entry, of=StoredFloats(entry=entry))

    def in_pieces(self, codec: Codec, dtype: str | None = None) -> Floats:
        """Return the checkpoint with a codec's tensors, converted floats in ``dtype``."""
        same = self.source.container.name == codec.container
        return self if same else in_pieces(self, codec, dtype)

    def omitted(self, codec: Codec) -> set[str]:
        """Return the tensors that a codec's files omit, as engines do."""
        config = self.source.config or {}
        entries = self.source.entries.values()
        return {e.name for e in entries if codec.model_format.stored_form(e.name, e.shape, config) is OMITTED}

    def without(self, names: Collection[str]) -> Floats:
        """Return the same checkpoint without some tensors."""
        if not names:
            return self
        left = Entries(entry for entry in self.source.entries.values() if entry.name not in names)
        readers = MappingProxyType({name: r for name, r in self.readers.items() if name not in names})
        return replace(self, source=replace(self.source, entries=left), readers=readers)


def unquantized(source: Source) -> Floats:
    """Return an unquantized checkpoint; raises CheckpointError for a quantized one."""
    require_unquantized(source.entries.values(), source.config, shown(source.root))
    return Floats(source=with_axes(source), readers=MappingProxyType({}), config=None)


def as_floats(source: Source, *, dtype: torch.dtype | None = None) -> Floats:
    """Return a checkpoint, quantized or not, as if it were not.

    dtype: of the floats; by default that which a graph gives to each, the configuration names, or bfloat16.
    Raises CheckpointError or UnsupportedError when codes cannot be read, listing what is wrong with which
    layer.
    """
    config = configuration(source)
    if config is None:
        return unquantized(source)
    place = shown(source.root)
    try:
        stored = find_layers(source)
    except UnsupportedError as error:
        raise UnsupportedError(f"{place} cannot be dequantized: {error}") from error
    if stored.problems:
        listed = "; ".join(map(str, stored.problems[:_LISTED]))
        raise CheckpointError(f"{place} cannot be dequantized: {listed}; pass the original checkpoint")
    readers = DecodedLayers(source, stored, dtype or (None if source.graph else _declared_dtype(source)))
    entries = _float_entries(source, readers)
    floats = replace(
        source,
        entries=entries,
        metadata={
            # What it says of tensors, under their names and in a list of these, is not said of the floats.
            name: {k: v for k, v in found.items() if k not in entries and k != "tensor_names"}
            for name, found in source.metadata.items()
        },
        companions=tuple(path for path in source.companions if str(path) not in _OF_QUANTIZATION),
        config=source.config and {k: v for k, v in source.config.items() if k not in CONFIG_KEYS},
        config_text=source.config_text if source.config is None else without_keys(source.config_text or ""),
    )
    require_unquantized(floats.entries.values(), floats.config, place)
    return Floats(source=with_axes(floats), readers=readers, config=config, config_reader=stored.reader)


class DecodedLayers(Mapping[str, RowReader]):
    """Quantized layers as tensors of floats, by name, each made on request."""

    def __init__(self, source: Source, stored: StoredLayers, dtype: torch.dtype | None) -> None:
        self._entries, self._stored, self._dtype = source.entries, stored, dtype
        self._config = source.config or {}
        self._experts = expert_layout(self._config)
        self._indexed = source.container.indexed

    def __getitem__(self, name: str) -> RowReader:
        for module in (module_of(name), name):
            number = self._stored.modules.number(module)
            if number is not None and self._stored.layers[number].name == name:
                return self._of(self._stored.layers[number])
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self._stored.layers)

    def __len__(self) -> int:
        return len(self._stored.layers)

    def _of(self, layer: StoredLayer) -> RowReader:
        joint = "." if layer.experts is None else "_"
        scales = (self._entries.get(f"{layer.module}{joint}{name}") for name in ACTIVATION_SCALES)
        fused = layer.experts is not None
        # Files of other containers have the matrices of a Conv1D as (out, in).
        conv1d = self._indexed and is_transposed(layer.module, self._config)
        transposed = self._experts.transposed if fused else conv1d
        matrix, dtype = layer.shape[::-1] if transposed else layer.shape, self._dtype or layer.dtype
        entry = TensorEntry(
            name=layer.name,
            dtype=FILE_DTYPES[dtype],
            begin=0,
            file=layer.codes.file,
            shape=matrix if layer.experts is None else (layer.experts, *matrix),
            nbytes=layer.values * dtype.itemsize,
            use=layer.codec.use,
            inputs_first=transposed and not fused,
        )
        decoded = Decoded(
            entry=entry,
            quantized=layer,
            scales=tuple(filter(None, scales)),
            inputs_first=transposed,
            one_scale=has_one_scale_each(layer, self._experts),
        )
        return in_model_form(decoded)


def _float_entries(source: Source, readers: Mapping[str, RowReader]) -> Entries:
    """Return the entries of ``source`` with one entry per quantized layer."""
    if not readers:
        return source.entries
    floats = {r.layer.codes.name: r.entry for r in readers.values() if r.layer is not None}
    gone = {entry.name for reader in readers.values() for entry in reader.quantized_tensors}
    return Entries(
        floats.get(name, entry)
        for name, entry in zip(source.entries, source.entries.values(), strict=True)
        if name in floats or name not in gone
    )


def _declared_dtype(source: Source) -> torch.dtype:
    """Return the dtype that the configuration names for weights, or bfloat16."""
    config = source.config or {}
    text = config.get("text_config")
    for table in (config, text if isinstance(text, dict) else {}):
        named = str(table.get("dtype", table.get("torch_dtype")))
        if named in _DTYPES:
            return _DTYPES[named]
    return torch.bfloat16


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
