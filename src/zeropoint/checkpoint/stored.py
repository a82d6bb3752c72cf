"""The quantized layers of a checkpoint: which tensors are whose, under which scheme.

Written by zeropoint or by others, as long as the configuration says ``quant_method: compressed-tensors``.
What is wrong with a layer is collected, not raised, so that everything can be named at once. This module
reads headers and the small tensors that hold shapes; it decodes nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..codecs.compressed_tensors import (
    GLOBAL_SCALE,
    PACKED,
    SCALE,
    SHAPE,
    WEIGHT,
    ZERO_POINT,
    Layout,
    tensor_specs,
    unfit,
)  # fmt: skip
from ..codecs.compressed_tensors_config import Group, matches, read_config
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..errors import CheckpointError, ZeropointError, printable
from ..formats import Format
from ..formats.torch_dtypes import format_of
from ..schemes import Scheme
from .documents import CONFIG_KEY, WEIGHTS_ONLY_CONFIG
from .safetensors_file import TensorEntry
from .source import MAX_JSON_BYTES, Source
from .storage import exists, open_file, read_small, shown

_OWN = (PACKED, SCALE, ZERO_POINT, SHAPE, GLOBAL_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A quantized weight in a checkpoint.

    module: its name. weight: its scheme. layout: how it lies in the file. shape, dtype: of the weight that
    was quantized.
    tensors: its tensors by suffix.
    """

    module: str
    weight: Scheme
    layout: Layout
    shape: tuple[int, int]
    dtype: torch.dtype
    tensors: Mapping[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The quantized layers of a checkpoint, its other tensors, and what is wrong with either."""

    layers: tuple[StoredLayer, ...]
    others: tuple[TensorEntry, ...]
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a weight from elsewhere: its shape and dtype before it was quantized."""

    shape: tuple[int, int]
    dtype: torch.dtype


def configuration(source: Source) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a checkpoint, or None when it has none.

    Raises CheckpointError when it is malformed.
    """
    found = (source.config or {}).get(CONFIG_KEY)
    if found is None and source.config is None:
        path = source.root / WEIGHTS_ONLY_CONFIG
        if exists(path):
            try:
                found = json.loads(read_small(path, limit=MAX_JSON_BYTES)[0]).get(CONFIG_KEY)
            except (ValueError, RecursionError, AttributeError) as error:
                raise CheckpointError(
                    f"{shown(path)} is no JSON object: {error}; the file is damaged"
                ) from error
    if found is None:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONFIG_KEY} of {shown(source.root)} is no object; the file is damaged")
    return found


def find_layers(source: Source, known: Mapping[str, Known] | None = None) -> Stored:
    """Return the quantized layers of ``source``; ``known`` gives what the original says of a weight.

    Raises CheckpointError when the checkpoint is not quantized in a way that is read here.
    """
    config = configuration(source)
    if config is None:
        raise CheckpointError(f"{shown(source.root)} is not quantized: its configuration has no {CONFIG_KEY}")
    groups, ignore = read_config(config)
    candidates = _by_module(source.entries.values())
    layers, problems = [], []
    for module, tensors in candidates.items():
        try:
            layers.append(_layer(module, tensors, (groups, ignore), source, (known or {}).get(module)))
        except ZeropointError as error:
            problems.append(f"{printable(module)}: {error}")
    taken = {entry.name for tensors in candidates.values() for entry in tensors.values()}
    others = tuple(entry for entry in source.entries.values() if entry.name not in taken)
    return Stored(layers=tuple(layers), others=others, groups=groups, ignore=ignore, problems=tuple(problems))


def _by_module(entries: Iterable[TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Return, by module and suffix, the tensors of modules that have a packed weight or a scale."""
    found: dict[str, dict[str, TensorEntry]] = {}
    plain: dict[str, TensorEntry] = {}
    for entry in entries:
        module, dot, last = entry.name.rpartition(".")
        if dot and last in _OWN:
            found.setdefault(module, {})[last] = entry
        elif dot and last == WEIGHT:
            plain[module] = entry
    for module, tensors in found.items():
        if module in plain:
            tensors[WEIGHT] = plain[module]
    return found


def _layer(
    module: str, tensors: dict[str, TensorEntry], rules: tuple[tuple[Group, ...], tuple[str, ...]],
    source: Source, known: Known | None,
) -> StoredLayer:  # fmt: skip
    groups, ignore = rules
    if matches(module, ignore):
        raise CheckpointError(
            "it is quantized, but the configuration ignores it, so loaders would not find it"
        )
    group = next((g for g in groups if matches(module, g.targets, linear=True)), None)
    if group is None:
        raise CheckpointError("it is quantized, but no group of the configuration names it")
    layout, weight = group.layer.layout, group.layer.weight
    shape = known.shape if known else _shape(tensors, layout)
    dtype = known.dtype if known else _dtype(tensors, layout, source)
    weight = _with_scale_format(weight, layout, dtype, tensors)
    problem = unfit(weight, layout, shape)
    if problem is not None:
        raise CheckpointError(problem)
    specs = {spec.suffix: spec for spec in tensor_specs(weight, layout, shape, dtype)}
    for suffix, spec in specs.items():
        entry = tensors.get(suffix)
        if entry is None:
            raise CheckpointError(f"{suffix} is missing, which {layout.value} needs")
        if entry.shape != spec.shape or entry.dtype != spec.dtype:
            raise CheckpointError(
                f"{suffix} is {entry.dtype} of shape {list(entry.shape)}, but must be {spec.dtype} of shape "
                f"{list(spec.shape)} for a weight of shape {list(shape)}"
            )
    surplus = sorted(tensors.keys() - specs.keys())
    if surplus:
        raise CheckpointError(f"{', '.join(surplus)} has no place in {layout.value}")
    if SHAPE in tensors and _read_shape(tensors[SHAPE]) != shape:
        raise CheckpointError(
            f"weight_shape says {list(_read_shape(tensors[SHAPE]))}, but the weight has shape {list(shape)}"
        )
    return StoredLayer(
        module=module, weight=weight, layout=layout, shape=shape, dtype=dtype, tensors=dict(tensors)
    )


def _shape(tensors: Mapping[str, TensorEntry], layout: Layout) -> tuple[int, int]:
    if layout is Layout.PACK:
        if SHAPE not in tensors:
            raise CheckpointError(f"weight_shape is missing, which {layout.value} needs")
        return _read_shape(tensors[SHAPE])
    packed = layout in (Layout.MXFP4, Layout.NVFP4)
    entry = tensors.get(PACKED if packed else WEIGHT)
    if entry is None or len(entry.shape) != 2:
        raise CheckpointError(f"its codes are missing or no matrix, which {layout.value} needs")
    return entry.shape[0], entry.shape[1] * (2 if packed else 1)


def _read_shape(entry: TensorEntry) -> tuple[int, int]:
    if entry.dtype != "I64" or entry.shape != (2,):
        raise CheckpointError(
            f"weight_shape is {entry.dtype} of shape {list(entry.shape)}, but must be I64 of [2]"
        )
    file = open_file(entry.file)
    try:
        buffer = bytearray(16)
        file.read_into(memoryview(buffer), entry.begin)
    finally:
        file.close()
    rows, columns = struct.unpack("<2q", buffer)
    return rows, columns


def _dtype(tensors: Mapping[str, TensorEntry], layout: Layout, source: Source) -> torch.dtype:
    """Return the dtype that the weight most likely had: that of linear scales, else the model's."""
    scale = tensors.get(SCALE)
    if layout not in (Layout.MXFP4, Layout.MXFP8, Layout.NVFP4) and scale is not None:
        return TORCH_DTYPES.get(scale.dtype, torch.float32)
    config = source.config or {}
    named = config.get("dtype", config.get("torch_dtype"))
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(named), torch.float32)


def _with_scale_format(
    weight: Scheme, layout: Layout, dtype: torch.dtype, tensors: Mapping[str, TensorEntry]
) -> Scheme:
    """Return the scheme with the scale format that the file has, where the layout leaves it open."""
    entry = tensors.get(SCALE)
    if layout in (Layout.MXFP4, Layout.MXFP8, Layout.NVFP4) or entry is None:
        return weight
    found = TORCH_DTYPES.get(entry.dtype)
    fmt: Format | None = None if found is None or found == dtype else format_of(found)
    return replace(weight, scales=(replace(weight.scales[0], format=fmt),))
