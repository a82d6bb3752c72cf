"""The quantized layers of a checkpoint: which tensors are whose, under which scheme.

Written by zeropoint or by others, as long as ``quant_method`` of the configuration is compressed-tensors or
fp8. What is wrong with a layer is collected, not raised, so that everything can be named at once. This module
reads headers and the small tensors that hold shapes; it decodes nothing.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..codecs import fp8_block
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
from ..codecs.compressed_tensors_config import Group, Targets, read_config
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..errors import CheckpointError, ZeropointError, printable
from ..formats import Format
from ..formats.torch_dtypes import format_of
from ..schemes import Granularity, Scheme
from .columns import Kinds, Made, Names
from .config_text import CONFIG_KEY, WEIGHTS_ONLY_CONFIG
from .entries import Entries, TensorEntry
from .problems import Problem
from .selection import CONFIG_KEYS, is_fused_experts, module_of
from .source import MAX_JSON_BYTES, Source
from .storage import exists, open_file, read_small, shown

# The last says that columns were quantized in another order, which no layout here has.
_OWN = (PACKED, SCALE, ZERO_POINT, SHAPE, GLOBAL_SCALE, "weight_g_idx")
_SCALE_DTYPES = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "U8")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A quantized weight in a checkpoint.

    module: its name. weight: its scheme. layout: how it lies in the file. shape, dtype: of the weight that
    was quantized.
    tensors: its tensors by suffix; those of fused experts have a first axis more.
    experts: how many matrices of ``shape`` lie one after the other, or None for a matrix.
    """

    module: str
    weight: Scheme
    layout: Layout
    shape: tuple[int, int]
    dtype: torch.dtype
    tensors: Mapping[str, TensorEntry]
    experts: int | None = None

    @property
    def name(self) -> str:
        """Name of the weight before it was quantized."""
        return f"{self.module}.{WEIGHT}" if self.experts is None else self.module

    @property
    def values(self) -> int:
        """Quantized numbers."""
        return math.prod(self.shape) * (1 if self.experts is None else self.experts)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The quantized layers of a checkpoint, its other tensors, and what is wrong with either.

    modules: those of the layers, in their order. unread: tensors of layers that ``problems`` are about.
    groups, ignore: of compressed-tensors; empty for fp8.
    """

    layers: Sequence[StoredLayer]
    modules: Names
    others: Sequence[TensorEntry]
    unread: Sequence[TensorEntry]
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    problems: tuple[Problem, ...]

    @staticmethod
    def none(entries: Entries) -> Stored:
        """Return what a checkpoint of floats alone holds."""
        return Stored.of(entries, _Layers(entries), ((), ()), ())

    @staticmethod
    def of(
        entries: Entries, layers: _Layers, rules: tuple[tuple[Group, ...], tuple[str, ...]],
        problems: Sequence[Problem],
    ) -> Stored:  # fmt: skip
        """Return what was found among ``entries``; ``layers`` knows which of them are taken."""
        others = array("I", (n for n in range(len(entries)) if not layers.taken[n]))
        unread = layers.unread()
        groups, ignore = rules
        return Stored(
            layers=Made(len(layers.modules), layers.at), modules=layers.modules, groups=groups, ignore=ignore,
            others=Made(len(others), lambda n: entries.at(others[n])),
            unread=Made(len(unread), lambda n: entries.at(unread[n])), problems=tuple(problems),
        )  # fmt: skip


class _Layers:
    """Layers in columns: what many have in common once, and for each the numbers of its tensors.

    taken: whether a tensor, by number, belongs to a layer or to what is wrong with one.
    """

    def __init__(self, entries: Entries) -> None:
        self.modules = Names()
        self.taken = bytearray(len(entries))
        self._entries = entries
        self._kinds, self._of = Kinds(), array("I")
        self._begins, self._tensors = array("q"), array("I")

    def unread(self) -> array[int]:
        """Return the numbers of the tensors of no layer that belong to what is wrong with one."""
        held = bytearray(len(self.taken))
        for number in self._tensors:
            held[number] = True
        return array("I", (n for n, taken in enumerate(self.taken) if taken and not held[n]))

    def add(self, layer: StoredLayer) -> None:
        self.modules.add(layer.module)
        suffixes = tuple((suffix, entry.dtype) for suffix, entry in layer.tensors.items())
        kind = (layer.weight, layer.layout, layer.shape, layer.dtype, layer.experts, suffixes)
        self._of.append(self._kinds.number(kind))
        self._begins.append(len(self._tensors))
        numbers = (self._entries.number(entry.name) for entry in layer.tensors.values())
        self._tensors.extend(n for n in numbers if n is not None)

    def at(self, number: int) -> StoredLayer:
        """Return the layer of a number."""
        weight, layout, shape, dtype, experts, suffixes = self._kinds[self._of[number]]
        tensors = {}
        for at, (suffix, stored) in enumerate(suffixes, self._begins[number]):
            entry = self._entries.at(self._tensors[at])
            tensors[suffix] = entry if entry.dtype == stored else replace(entry, dtype=stored)
        return StoredLayer(
            module=self.modules[number], weight=weight, layout=layout, shape=shape, dtype=dtype,
            tensors=tensors, experts=experts,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a weight from elsewhere: its shape and dtype before it was quantized."""

    shape: tuple[int, int]
    dtype: torch.dtype


def configuration(source: Source) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a checkpoint, or None when it has none.

    Raises CheckpointError when it is malformed.
    """
    config = source.config or {}
    found = next((config[key] for key in CONFIG_KEYS if config.get(key) not in (None, {})), None)
    if found is None and source.config is None:
        path = source.root / WEIGHTS_ONLY_CONFIG
        if exists(path):
            try:
                found = json.loads(read_small(path, limit=MAX_JSON_BYTES)[0]).get(CONFIG_KEY)
            except (ValueError, RecursionError, AttributeError) as error:
                raise CheckpointError(
                    f"{shown(path)} is not a JSON object: {error}; the file is damaged"
                ) from error
    if found is None:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONFIG_KEY} of {shown(source.root)} is not an object; the file is damaged")
    return found


def find_layers(source: Source, known: Callable[[str], Known | None] | None = None) -> Stored:
    """Return the quantized layers of ``source``; ``known`` gives what the original says of a module's weight.

    Raises CheckpointError when the checkpoint is not quantized in a way that is read here.
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
    if config.get("quant_method") == fp8_block.QUANT_METHOD:
        return _find_fp8(source, fp8_block.weight_scheme(config))
    rules = read_config(config)
    named = [(group, Targets(group.targets)) for group in rules[0]], Targets(rules[1])
    layers, problems = _Layers(source.entries), []
    for module, tensors in _by_module(source.entries, layers.taken):
        try:
            layers.add(_layer(module, tensors, named, source, known and known(module)))
        except ZeropointError as error:
            problems.append(Problem(where=module, what=str(error)))
    return Stored.of(source.entries, layers, rules, problems)


def _find_fp8(source: Source, weight: Scheme) -> Stored:
    """Return the quantized layers of an fp8 checkpoint; codes without factors are a problem."""
    entries = source.entries
    layers, problems = _Layers(entries), []
    weights, factors = Names(), array("i")
    for number, entry in enumerate(entries.values()):
        name = fp8_block.weight_of(entry.name)
        if name is None and not entry.dtype.startswith("F8_"):
            continue
        layers.taken[number] = True
        if weights.add(name or entry.name) is not None:
            factors.append(-1)
        at = weights.number(name or entry.name)
        if name is not None and at is not None:
            factors[at] = number if factors[at] == -1 else _SEVERAL
    for at, name in enumerate(weights):
        codes = entries.number(name)
        if codes is not None:
            layers.taken[codes] = True
        try:
            layers.add(_fp8_layer(entries, codes, factors[at], weight))
        except ZeropointError as error:
            problems.append(Problem(where=name, what=str(error)))
    return Stored.of(entries, layers, ((), ()), problems)


_SEVERAL = -2


def _fp8_layer(entries: Entries, number: int | None, factor: int, weight: Scheme) -> StoredLayer:
    """Return a layer of the codes and the factors of these numbers."""
    if number is None:
        what = f"{printable(entries.at(factor).name)} is there" if factor >= 0 else "its factors are there"
        raise CheckpointError(f"{what}, but its codes are missing")
    codes = entries.at(number)
    if codes.dtype != fp8_block.CODES:
        raise CheckpointError(f"its codes are {codes.dtype}, but must be {fp8_block.CODES}")
    if factor < 0:
        count = "several" if factor == _SEVERAL else "0"
        raise CheckpointError(f"it has {count} tensors of factors, but must have one")
    scale = entries.at(factor)
    scale = replace(scale, dtype="F8_E8M0") if scale.dtype == "U8" else scale
    if scale.dtype not in fp8_block.FACTORS:
        raise CheckpointError(f"its factors are {scale.dtype}, but must be {', '.join(fp8_block.FACTORS)}")
    fused = is_fused_experts(codes)
    if len(codes.shape) != 2 + fused or 0 in codes.shape:
        raise CheckpointError(f"its codes have shape {list(codes.shape)}, but must be a matrix")
    shape = (codes.shape[-2], codes.shape[-1])
    experts = codes.shape[0] if fused else None
    weight = weight if experts is None else _expert_blocks(weight, shape, scale.shape)
    grid = tensor_specs(weight, Layout.NAIVE, shape, torch.float32)[1].shape
    wanted = grid if experts is None else (experts, *grid)
    if scale.shape != wanted and (scale.shape, wanted) != ((), (1,)):
        raise CheckpointError(f"its factors have shape {list(scale.shape)}, but must have {list(wanted)}")
    return StoredLayer(
        module=module_of(codes.name), weight=weight, layout=Layout.NAIVE, shape=shape, dtype=torch.float32,
        tensors={WEIGHT: codes, SCALE: scale}, experts=experts,
    )  # fmt: skip


def _expert_blocks(weight: Scheme, shape: tuple[int, int], factors: tuple[int, ...]) -> Scheme:
    """Return the scheme of fused experts: without blocks, or below one, gate and up have a factor each."""
    whole = weight.granularity == Granularity.tensor()
    if len(factors) != 3 or (factors[1:] == weight.granularity.grid(shape) and not whole):
        return weight
    if any(not n or extent % n for extent, n in zip(shape, factors[1:], strict=True)):
        return weight
    blocks = [extent // n for extent, n in zip(shape, factors[1:], strict=True)]
    return fp8_block.weight_scheme({"weight_block_size": blocks})


def _by_module(entries: Entries, taken: bytearray) -> Iterator[tuple[str, dict[str, TensorEntry]]]:
    """Yield, for each module that has a packed weight or a scale, its tensors by suffix, and mark them."""
    modules = Names()
    columns = {suffix: array("i") for suffix in (*_OWN, WEIGHT)}
    for own in (True, False):
        for number, name in enumerate(entries):
            module, dot, last = name.rpartition(".")
            if not dot or (last not in _OWN if own else last != WEIGHT):
                continue
            if own and modules.add(module) is not None:
                for column in columns.values():
                    column.append(-1)
            at = modules.number(module)
            if at is not None:
                columns[last][at] = number
                taken[number] = True
    for at, module in enumerate(modules):
        yield module, {last: entries.at(column[at]) for last, column in columns.items() if column[at] >= 0}


def _layer(
    module: str, tensors: dict[str, TensorEntry], rules: tuple[list[tuple[Group, Targets]], Targets],
    source: Source, known: Known | None,
) -> StoredLayer:  # fmt: skip
    groups, ignore = rules
    scale = tensors.get(SCALE)
    if scale is not None and scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(f"weight_scale is {scale.dtype}, but must be one of {', '.join(_SCALE_DTYPES)}")
    if ignore.match(module):
        raise CheckpointError(
            "it is quantized, but the configuration ignores it, so loaders would not find it"
        )
    group = next((g for g, named in groups if named.match(module, linear=True)), None)
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
