"""Decide everything before anything is read or written: each tensor's fate, each output byte's place.

A plan is a value: what is quantized and how, what is kept and why, which files come out with which headers
and offsets, how much memory and disk it takes. Running it (run.py) makes no more decisions. This module reads
no weights.

Output shards have the names of the input's, and each tensor stays in its shard. Inside a file, tensors lie in
the order that safetensors' own writer gives them: falling dtype, then name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..architectures import is_transposed
from ..codecs.compressed_tensors import Layout, TensorSpec, row_alignment, tensor_specs
from ..codecs.compressed_tensors_config import LayerScheme, layer_scheme
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..errors import CheckpointError, UnsupportedError, printable
from ..formats import RoundingMode
from ..recipes import Recipe
from .config_text import WEIGHTS_ONLY_CONFIG
from .decisions import Decision, decide, fate
from .documents import MANIFEST, index_and_config
from .entries import TensorEntry
from .experts import matrices
from .fates import Fates
from .limits import Limits, value_bytes
from .origin import Floats, Origin, as_floats, unquantized
from .partners import fused_sets, split_sets
from .recipe import RecipeText, one_scheme
from .safetensors_file import DTYPE_BITS, header_bytes
from .selection import Dequantize, Selection, check_patterns, module_of
from .source import CONFIG, Source
from .storage import shown, stamp
from .tied import tied_copies, tied_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An output tensor and its place: ``nbytes`` bytes of ``shard`` from the absolute offset ``begin``."""

    name: str
    spec: TensorSpec
    shard: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A matrix to quantize: where its rows come from, and the tensors that it becomes.

    first: its first row among those of the origin, which for fused experts has more. share: name of the set
    whose members take one tensor scale together, or None.
    """

    module: str
    origin: Origin
    first: int
    shape: tuple[int, int]
    layer: LayerScheme
    outputs: tuple[Placed, ...]
    share: str | None = None

    @property
    def source(self) -> TensorEntry:
        """The tensor of the source that holds it, as floats."""
        return self.origin.entry

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its numbers."""
        return self.origin.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, as floats."""
        return self.shape[1] * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Memory that each number of a tile takes."""
        quantizing = value_bytes(self.layer.weight, self.dtype)
        return quantizing + self.origin.value_bytes - self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """Rows of which a part must hold a multiple to be quantized and written alone."""
        return math.lcm(row_alignment(self.layer.weight), self.origin.alignment)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScale:
    """Weights whose tensor scale is that of all of them, and the shards in which they lie."""

    modules: tuple[str, ...]
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that is copied as it is."""

    source: TensorEntry
    placed: Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A tensor that is written as the floats that its codes stand for."""

    origin: Origin
    placed: Placed

    @property
    def shape(self) -> tuple[int, int]:
        """Its rows and columns; all axes but the last count as rows."""
        *rows, columns = self.origin.entry.shape
        return math.prod(rows), columns

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, as floats."""
        return self.shape[1] * self.origin.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Memory that each number of a tile takes."""
        return self.origin.value_bytes

    @property
    def alignment(self) -> int:
        """Rows of which a part holds a multiple so that nothing is decoded twice."""
        return self.origin.alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShard:
    """A file to write: its name, its first bytes and its size."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a run does; see the module.

    recipe, selection: what was asked for. texts: name to content of the small files that are written, the
    index and the configuration. companions: path to bytes of the files that are copied. notes: sentences for
    the report.
    """

    source: Source
    recipe: RecipeText
    selection: Selection
    decisions: tuple[Decision, ...]
    weights: tuple[Weight, ...]
    kept: tuple[Kept, ...]
    restored: tuple[Restored, ...]
    shards: tuple[OutputShard, ...]
    texts: Mapping[str, str]
    companions: Mapping[Path, int]
    notes: tuple[str, ...]
    limits: Limits

    @property
    def layers(self) -> tuple[LayerScheme, ...]:
        """The schemes of weights, in the order of their first weight."""
        return tuple(dict.fromkeys(weight.layer for weight in self.weights))

    @property
    def worked(self) -> tuple[Weight | Restored, ...]:
        """All that is more than copied."""
        return (*self.weights, *self.restored)

    @property
    def worked_bytes(self) -> int:
        """Bytes of all tensors that are worked on or copied, codes counted as the floats that they become."""
        worked = sum(item.shape[0] * item.row_bytes for item in self.worked)
        return worked + sum(kept.source.nbytes for kept in self.kept)

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(entry.nbytes for entry in self.source.entries.values())

    @property
    def output_bytes(self) -> int:
        """Bytes of all files that are written but the manifest, which says what came of them."""
        return (
            sum(shard.size for shard in self.shards)
            + sum(self.companions.values())
            + sum(map(len, self.texts.values()))
        )

    @property
    def quantized_values(self) -> int:
        """Numbers that are quantized."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def restored_values(self) -> int:
        """Numbers that are written as floats, and were codes."""
        return sum(math.prod(restored.shape) for restored in self.restored)

    @property
    def bits_per_value(self) -> float:
        """Average bits that a quantized number takes, scales and zero points counted."""
        return 8 * sum(p.nbytes for w in self.weights for p in w.outputs) / max(1, self.quantized_values)

    @property
    def peak_memory(self) -> int:
        """Estimate of the largest memory of a run, interpreter and libraries included."""
        largest = max(w.shape[1] * slab_rows(w, self.limits) * w.value_bytes for w in self.worked)
        return self.limits.base_memory + self.limits.workers * largest

    @property
    def shared_scales(self) -> tuple[SharedScale, ...]:
        """The sets of weights that take one tensor scale together."""
        members: dict[str, list[Weight]] = {}
        for weight in self.weights:
            if weight.share is not None:
                members.setdefault(weight.share, []).append(weight)
        return tuple(
            SharedScale(
                modules=tuple(weight.module for weight in same),
                shards=tuple(dict.fromkeys(weight.source.file.name for weight in same)),
            )
            for same in members.values()
        )

    @property
    def unfit(self) -> tuple[Decision, ...]:
        """Linear weights that are kept although nobody asked for it."""
        return tuple(d for d in self.decisions if d.left_alone)


def slab_rows(weight: Weight | Restored, limits: Limits) -> int:
    """Return how many rows of ``weight`` are worked on at once."""
    rows, columns = weight.shape
    return limits.rows(columns, min(weight.alignment, max(1, rows)), weight.value_bytes)


def make_plan(
    source: Source, to: str | RecipeText, *, selection: Selection | None = None, limits: Limits | None = None
) -> Plan:
    """Return the plan that quantizes ``source`` to a layer preset or weight scheme, or by a recipe.

    Raises CheckpointError when the source is an adapter, has a config.json that cannot be read or is
    quantized already, a pattern matches nothing, two output tensors
    would have one name, nothing would be quantized or (under ``selection.strict``) a linear weight is left
    alone or layers that engines run as one have several schemes; RecipeError for a malformed recipe and for a
    rule about nothing; UnsupportedError when no layout holds the scheme; CheckpointError when ``limits`` are
    too small for one part of a weight.
    """
    text = RecipeText.of(to) if isinstance(to, str) else to
    recipe = one_scheme(layer_scheme(to)) if isinstance(to, str) else to.parse()
    _require_model(source)
    selection, limits = selection or Selection(), limits or Limits.default()
    _require_deterministic(recipe)
    floats = _floats(source, selection)
    check_patterns(selection, floats.source.entries)
    decisions = decide(floats.source, recipe, selection)
    split = split_sets(decisions)
    if split and selection.strict:
        raise CheckpointError(f"{'; '.join(split)}; give each set one scheme, or leave out --strict")
    every = selection.dequantize is Dequantize.EVERY
    fates = Fates.of(floats, decisions, tied_copies(source), every=every)
    fates.require_sense(every=every)
    shards, places = _lay_out(source, _members(fates))
    located = {name: (placed.shard, placed.nbytes) for name, placed in places.items()}
    texts = index_and_config(floats, decisions, located, staying=fates.staying)
    companions = [path for path in floats.source.companions if str(path) not in (*texts, MANIFEST)]
    plan = Plan(
        source=source, recipe=text, selection=selection, decisions=fates.decisions,
        weights=_weights(fates, places), shards=shards, texts=texts, limits=limits,
        kept=tuple(Kept(source=entry, placed=places[entry.name]) for entry in fates.kept),
        restored=tuple(Restored(origin=o, placed=places[o.entry.name]) for o in fates.restored),
        notes=(*source.notes, *_notes(floats.source, decisions), *split, *fates.notes()),
        companions={path: stamp(source.root / path).size for path in companions},
    )  # fmt: skip
    for weight in plan.worked:
        slab_rows(weight, limits)
    return plan


_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|hada_w\d_[ab]|lokr_w\d)\b")
"""What PEFT calls the parts of adapters: tuners of LoRA, LoHa and LoKr."""
_ADAPTER_CONFIG = "adapter_config.json"


def _require_model(source: Source) -> None:
    """Raise CheckpointError for an adapter, and for a config.json that says nothing of the model."""
    found = next((name for name in source.entries if _ADAPTER.search(name)), None)
    if found is None and source.config is None and Path(_ADAPTER_CONFIG) in source.companions:
        found = _ADAPTER_CONFIG
    if found is not None:
        raise CheckpointError(
            f"{shown(source.root)} is an adapter (it holds {printable(found)}), not a model; merge it into "
            "its base model first, as with merge_and_unload() of PEFT"
        )
    if source.config is None and Path(CONFIG) in source.companions:
        raise CheckpointError(
            f"{shown(source.root / CONFIG)} is not a valid configuration, and the result could not say in it "
            "what is quantized; correct it, or remove it to quantize the weights alone"
        )


def _floats(source: Source, selection: Selection) -> Floats:
    if selection.dequantize is Dequantize.NONE:
        return unquantized(source)
    return as_floats(source, dtype=None if selection.floats is None else TORCH_DTYPES[selection.floats])


def _require_deterministic(recipe: Recipe) -> None:
    """Raise UnsupportedError for a scheme whose codes would depend on how weights are cut."""
    for rule in (*recipe.rules, recipe.default):
        weight = None if rule.gives is None else rule.gives.weight
        if weight is not None and weight.rounding.mode is RoundingMode.STOCHASTIC:
            raise UnsupportedError(
                f"{weight} draws random bits by the place in a tensor, but weights are quantized in parts; "
                "use half_even"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """An output tensor before it has a place; ``of`` is the tensor of the source that it comes from."""

    name: str
    spec: TensorSpec
    shard: str
    nbytes: int
    of: str

    @staticmethod
    def whole(entry: TensorEntry) -> _Member:
        """Return a tensor that comes out as ``entry`` says; its dtype may be one that torch has not."""
        spec = TensorSpec(suffix="", dtype=entry.dtype, shape=entry.shape)
        return _Member(name=entry.name, spec=spec, shard=entry.file.name, nbytes=entry.nbytes, of=entry.name)


def _members(fates: Fates) -> list[_Member]:
    """Return all output tensors; raises CheckpointError when two would have one name."""
    members = [_Member.whole(entry) for entry in (*fates.kept, *(o.entry for o in fates.restored))]
    for entry, layer in fates.quantized:
        members += [
            _Member(
                name=f"{m.module}.{spec.suffix}", spec=spec, shard=entry.file.name, of=entry.name,
                nbytes=math.prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8,
            )
            for m in matrices(entry)
            for spec in tensor_specs(layer.weight, layer.layout, m.shape, TORCH_DTYPES[entry.dtype])
        ]  # fmt: skip
    seen: dict[str, _Member] = {}
    for member in members:
        first = seen.setdefault(member.name, member)
        if first is not member:
            raise CheckpointError(
                f"tensor {printable(member.name)} would come out twice, of {printable(first.of)} and of "
                f"{printable(member.of)}; rename one, or ignore the weight"
            )
    return members


def _weights(fates: Fates, places: Mapping[str, Placed]) -> tuple[Weight, ...]:
    """Return the matrices to quantize."""
    drafts = [(entry, layer, m) for entry, layer in fates.quantized for m in matrices(entry)]
    shares = fused_sets(m.module for _, layer, m in drafts if layer.layout is Layout.NVFP4)
    return tuple(
        Weight(
            module=m.module, origin=fates.floats.origin(entry), shape=m.shape, layer=layer,
            first=(m.begin - entry.begin) // (m.shape[1] * TORCH_DTYPES[entry.dtype].itemsize),
            outputs=tuple(places[name] for name in _names(m.module, layer, m.shape, entry)),
            share=shares.get(m.module),
        )
        for entry, layer, m in drafts
    )  # fmt: skip


def _names(module: str, layer: LayerScheme, shape: tuple[int, int], entry: TensorEntry) -> list[str]:
    return [
        f"{module}.{s.suffix}"
        for s in tensor_specs(layer.weight, layer.layout, shape, TORCH_DTYPES[entry.dtype])
    ]


_DTYPE_ORDER = {name: order for order, name in enumerate(DTYPE_BITS)}


def _lay_out(source: Source, members: Sequence[_Member]) -> tuple[tuple[OutputShard, ...], dict[str, Placed]]:
    """Return the output files and the place of each tensor by name."""
    by_shard: dict[str, list[_Member]] = {name: [] for name in source.shards}
    for member in members:
        by_shard[member.shard].append(member)
    shards, places = [], {}
    for name, group in by_shard.items():
        group.sort(key=lambda m: (-_DTYPE_ORDER[m.spec.dtype], m.name))
        header = header_bytes(
            [(m.name, m.spec.dtype, m.spec.shape, m.nbytes) for m in group], source.metadata[name]
        )
        begin = len(header)
        for m in group:
            places[m.name] = Placed(name=m.name, spec=m.spec, shard=name, begin=begin, nbytes=m.nbytes)
            begin += m.nbytes
        shards.append(OutputShard(name=name, header=header, size=begin))
    return tuple(shards), places


def _notes(source: Source, decisions: Sequence[Decision]) -> list[str]:
    notes = []
    heads = tied_heads(source)
    if heads:
        notes.append(f"the head ({', '.join(heads)}) is tied to the embedding and stays as that is")
    if (source.config or {}).get("tie_word_embeddings") is True:
        notes += [
            f"{printable(d.entry.name)} is quantized, but config.json ties it to the embedding"
            for d in decisions
            if d.quantized and module_of(d.entry.name).endswith("lm_head")
        ]
    family = source.config or {}
    turned = [d for d in decisions if d.quantized and is_transposed(module_of(d.entry.name), family)]
    if turned:
        notes.append(
            f"{len(turned)} weights are stored transposed, and their blocks run along the outputs, such as "
            f"{fate(turned[0])}"
        )
    notes += _left_alone(decisions)
    if source.config is None:
        notes.append(f"no config.json: the configuration is written to {WEIGHTS_ONLY_CONFIG}")
    return notes


def _left_alone(decisions: Iterable[Decision]) -> list[str]:
    """Return a sentence for each reason why linear weights are kept although nobody asked for it."""
    found: dict[str, list[Decision]] = {}
    for decision in decisions:
        if decision.left_alone:
            found.setdefault(decision.choice.reason, []).append(decision)
    return [
        f"kept {fate(same[0])}" + (f", and {len(same) - 1} more for this reason" if len(same) > 1 else "")
        for same in found.values()
    ]
