"""Quantized layers of a checkpoint: their tensors and schemes.

Written by zeropoint or by others, as long as some codec claims the configuration. What is wrong with a layer
is collected, not raised, so that everything can be named at once. This module reads headers and the small
tensors that codecs ask for; it decodes nothing.
"""

from __future__ import annotations

import functools
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...codecs.known import CONFIG_KEYS, TOOL_FILES
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.records import Entry, Known, Reader, Record
from ...codecs.registry import claiming, codecs_in, methods
from ...columns import Interned, LazySequence, StringTable
from ...errors import CheckpointError, ZeropointError, printable
from ...libraries import reading
from ...schemes import Scheme
from .config_text import CONFIG_KEY, WEIGHTS_ONLY_CONFIG
from .problems import Problem
from .source import MAX_JSON_BYTES, Source
from .storage import Place, exists, opened, read_bytes, read_small, shown
from .tensor_entries import Entries, TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A quantized weight in a checkpoint.

    module: its name. layer: its scheme. shape, dtype: of the weight that was quantized. tensors: by the names
    of its codec, the codes first; fused experts have a first axis more.
    experts: how many matrices of ``shape`` lie one after the other, or None for a matrix.
    """

    module: str
    layer: LayerScheme
    shape: tuple[int, int]
    dtype: torch.dtype
    tensors: Mapping[str, TensorEntry]
    experts: int | None = None

    @property
    def weight(self) -> Scheme:
        """The scheme of the weight."""
        return self.layer.weight

    @property
    def codec(self) -> Codec:
        """Name of its layout in the file."""
        return self.layer.codec

    @property
    def negative_scales(self) -> bool:
        """Whether scales may be negative: some integers and codebooks."""
        element = self.weight.element
        return self.codec.negative_scales and (element.is_integer or element.is_table)

    @property
    def codes(self) -> TensorEntry:
        """The tensor of its codes."""
        return next(iter(self.tensors.values()))

    @property
    def name(self) -> str:
        """Name of the weight before it was quantized."""
        return f"{self.module}.weight" if self.experts is None else self.module

    @property
    def values(self) -> int:
        """Quantized values."""
        return math.prod(self.shape) * (1 if self.experts is None else self.experts)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


class _NoLayers(Reader):
    """Reader of a float checkpoint, which has no quantized layers."""

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:  # noqa: ARG002
        raise CheckpointError(f"{printable(key)} is not quantized; the checkpoint is one of floats")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayers:
    """Quantized layers of a checkpoint, its other tensors, and their problems.

    modules: of the layers, in their order. unread: tensors of layers that ``problems`` are about.
    reader: what the codec reads in the configuration.
    """

    layers: Sequence[StoredLayer]
    modules: StringTable
    others: Sequence[TensorEntry]
    unread: Sequence[TensorEntry]
    reader: Reader
    problems: tuple[Problem, ...]

    @property
    def ignore(self) -> tuple[str, ...]:
        """Modules that the configuration says are not quantized."""
        return self.reader.ignore

    @staticmethod
    def none(entries: Entries) -> StoredLayers:
        """Return the layers of a float checkpoint: none."""
        return StoredLayers.of(entries, _Layers(entries), _NoLayers(), ())

    @staticmethod
    def of(entries: Entries, layers: _Layers, reader: Reader, problems: Sequence[Problem]) -> StoredLayers:
        """Return the layers found in ``entries``, with the tensors left over."""
        others = array("I", (n for n in range(len(entries)) if not layers.taken[n]))
        unread = layers.unread()
        return StoredLayers(
            layers=LazySequence(len(layers.modules), layers.at),
            modules=layers.modules,
            reader=reader,
            others=LazySequence(len(others), lambda n: entries.at(others[n])),
            unread=LazySequence(len(unread), lambda n: entries.at(unread[n])),
            problems=tuple(problems),
        )


class _Layers:
    """Layers in columns: shared facts once, tensor numbers for each.

    taken: whether a tensor, by number, belongs to a layer or to what is wrong with one.
    """

    def __init__(self, entries: Entries) -> None:
        self.modules = StringTable()
        self.taken = bytearray(len(entries))
        self._entries = entries
        self._kinds, self._of = Interned(), array("I")
        self._begins, self._tensors = array("q"), array("I")

    def unread(self) -> array[int]:
        """Return the numbers of the tensors of faulty layers."""
        held = bytearray(len(self.taken))
        for number in self._tensors:
            held[number] = True
        return array("I", (n for n, taken in enumerate(self.taken) if taken and not held[n]))

    def add(self, record: Record, tensors: Mapping[str, TensorEntry]) -> None:
        self.modules.add(record.module)
        kind = (record.layer, record.shape, record.dtype, record.experts, record.parts)
        self._of.append(self._kinds.number(kind))
        self._begins.append(len(self._tensors))
        self._tensors.extend(self._entries.numbered(tensors[part].name) for part in record.parts)

    def at(self, number: int) -> StoredLayer:
        """Return the layer of a number."""
        layer, shape, dtype, experts, parts = self._kinds[self._of[number]]
        begin = self._begins[number]
        tensors = {part: self._entries.at(self._tensors[begin + at]) for at, part in enumerate(parts)}
        return StoredLayer(
            module=self.modules[number],
            layer=layer,
            shape=shape,
            dtype=dtype,
            tensors=tensors,
            experts=experts,
        )


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """A checkpoint as codecs read it."""

    source: Source
    quantization: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration."""
        return self.source.config or {}

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """The joint metadata of all files; the last file wins."""
        every = (item for found in self.source.metadata.values() for item in found.items())
        return {key: value for key, value in every if isinstance(value, str)}

    @property
    def graph(self) -> bytes:
        """Graph of a file without its tensors."""
        return self.source.graph

    def document(self, name: str) -> Mapping[str, Any] | None:
        """Return a JSON file of the checkpoint, or None."""
        present = any(str(path) == name for path in self.source.companions)
        return json_object(self.source.root / name) if present else None

    def read(self, entry: Entry) -> bytes:
        """Return the bytes of a tensor of the checkpoint."""
        found = self.source.entries[entry.name]
        with opened(found.file) as file:
            return bytes(read_bytes(file, found.begin, found.nbytes))


def configuration(source: Source) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a checkpoint, or None when it has none.

    Raises CheckpointError when it is malformed.
    """
    if not source.container.indexed:
        return _of_container(source)
    config = source.config or {}
    found = next((config[key] for key in CONFIG_KEYS if config.get(key) not in (None, {})), None)
    if found is None and source.config is None:
        path = source.root / WEIGHTS_ONLY_CONFIG
        found = json_object(path).get(CONFIG_KEY) if exists(path) else None
    if found is None:
        return next(filter(claiming, _documents_of_tools(source)), None)
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONFIG_KEY} of {shown(source.root)} is not an object; the file is damaged")
    return found


def json_object(path: Place) -> dict[str, Any]:
    """Return the object in a JSON file; raises CheckpointError otherwise."""
    try:
        found = json.loads(read_small(path, limit=MAX_JSON_BYTES)[0])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown(path)} is not a JSON object: {error}; the file is damaged") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{shown(path)} is not a JSON object; the file is damaged")
    return found


def _documents_of_tools(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the quantization files of tools, used where config.json is silent."""
    present = {str(path) for path in source.companions}
    return (json_object(source.root / name) for name in TOOL_FILES if name in present)


def _of_container(source: Source) -> dict[str, Any] | None:
    """Return a container's implicit configuration, or None for floats."""
    codecs = codecs_in(source.container.name)
    counts = [sum(_part(entry, codec) is not None for entry in source.entries.values()) for codec in codecs]
    # A codec with fewer parts says more of what has all of them.
    order = sorted(range(len(codecs)), key=lambda n: (-counts[n], len(codecs[n].parts)))
    return {"quant_method": codecs[order[0]].methods[0]} if counts[order[0]] else None


def _part(entry: TensorEntry, codec: Codec) -> tuple[str, str, bool] | None:
    """Return a tensor's layer and part, by its graph or ``part_of``."""
    if entry.use is None:
        return codec.part_of(entry.name, entry.dtype)
    part = entry.use.part
    return None if part is None or part[1] not in codec.parts else (*part, True)


def find_layers(source: Source, known: Callable[[str], Known | None] | None = None) -> StoredLayers:
    """Return the quantized layers of ``source``.

    known: from a module to the facts about its weight in the original. Raises CheckpointError when the
    checkpoint is not quantized in a way that is read here.
    """
    config = configuration(source)
    if config is None:
        if source.given != source.root:
            raise CheckpointError(
                f"{shown(source.given)} is one file, without a configuration; pass its directory"
            )
        raise CheckpointError(
            f"{shown(source.root)} is not quantized: its configuration has no {CONFIG_KEY}; pass the output "
            "of zeropoint quantize"
        )
    codec = claiming(config)
    if codec is None:
        raise CheckpointError(
            f"quant_method is {config.get('quant_method')!r}, but only {' and '.join(methods())} are read; "
            "pass one of these"
        )
    with _documents(source):
        reader = codec.reader(_Listing(source=source, quantization=config), codec)
    layers, problems = _Layers(source.entries), []
    for key, tensors, several in _by_weight(source.entries, codec, layers.taken):
        try:
            if several:
                raise CheckpointError(f"it has several tensors of {several}, but must have one")
            with _documents(source):
                layers.add(reader.record(key, tensors, known and known(key)), tensors)
        except ZeropointError as error:
            problems.append(Problem(where=key, what=str(error)))
    return StoredLayers.of(source.entries, layers, reader, problems)


def _documents(source: Source) -> AbstractContextManager[None]:
    return reading(
        f"the configuration of {shown(source.root)} does not describe its layers", "download it again"
    )


_SEVERAL = -2


def _by_weight(
    entries: Entries, codec: Codec, taken: bytearray
) -> Iterator[tuple[str, dict[str, TensorEntry], str]]:
    """Yield each layer key, its tensors by part, and a duplicate part.

    Tensors that are surely a codec's come first, and others join them; all of them are marked as taken.
    """
    keys = StringTable()
    columns: dict[str, array[int]] = {}
    for own in (True, False):
        for number, entry in enumerate(entries.values()):
            found = _part(entry, codec)
            if found is None or found[2] is not own:
                continue
            key, part, _ = found
            if own and keys.add(key) is not None:
                for column in columns.values():
                    column.append(-1)
            at = keys.number(key)
            if at is not None:
                column = columns.setdefault(part, array("i", [-1]) * len(keys))
                column[at] = number if column[at] == -1 else _SEVERAL
                taken[number] = True
    for at, key in enumerate(keys):
        several = next((part for part, column in columns.items() if column[at] == _SEVERAL), "")
        yield (
            key,
            {part: entries.at(column[at]) for part, column in columns.items() if column[at] >= 0},
            several,
        )
