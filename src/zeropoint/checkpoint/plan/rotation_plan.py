"""Plans that rotate the residual stream of a model, and the values of its heads, with all of it folded.

What comes out is an ordinary model of the same architecture, whose logits are those of the source but for
rounding: norms have a weight of one, matrices are rotated on the sides where they read or write the stream,
and a head that was tied to the embedding is a tensor of its own, since only the head takes in the last norm.
The rotations are block Hadamard matrices with random signs, which spread outliers over their block.

Source: Ashkboos et al., QuaRot, arXiv:2404.00456, without the rotations that a model would do itself; Liu et
al., SpinQuant, arXiv:2405.16406, whose R1 and R2 these are, there learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...codecs.registry import DEFAULT
from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ...errors import CheckpointError, count, size_of
from ...ops.rotation import Rotation
from ..choose.adapters import require_model
from ..choose.decisions import TensorDecision, compact
from ..choose.recipe import RecipeText
from ..choose.residual_stream import EMBEDDING, HEAD, Role, Stream, stream_of
from ..choose.selection import FLOATS, WEIGHT, WEIGHT_DTYPES, Selection, Why
from ..read.config_text import with_members
from ..read.source import CONFIG, Source
from ..read.storage import stamp
from ..read.tensor_entries import Entries, TensorEntry
from .actions import Actions
from .checkpoint_plan import CheckpointPlan, kinds_of
from .config_and_index import MANIFEST, index_and_config, readable
from .cuts import tile_shape
from .folded import Folded, RotatedSide
from .limits import Limits
from .new_tensor import NewTensor
from .origin import Floats, Origin, unquantized
from .placement import Placements
from .texts import Text

_UNTIED = "tie_word_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotations:
    """What is asked for.

    seed: of the signs. block: numbers of the stream that are mixed, a power of two that divides it; None for
    the largest. dtype: of all floats as safetensors spells it; None for that which each has.
    """

    seed: int = 0
    block: int | None = None
    dtype: str | None = None

    def of(self, stream: Stream) -> tuple[RotatedSide, RotatedSide]:
        """Return the rotations of the stream, and of the values of a head.

        Raises CheckpointError for a block that does not divide the stream, SchemeError for a bad seed.
        """
        largest = stream.width & -stream.width
        block = largest if self.block is None else self.block
        if block < 1 or block & (block - 1) or stream.width % block:
            raise CheckpointError(
                f"block (={block}) must be a power of two that divides the hidden_size {stream.width}; use "
                f"{largest} or less"
            )
        heads = Rotation(size=stream.head & -stream.head, seed=self.seed)
        return RotatedSide(Rotation(size=block, seed=self.seed), stream.width), RotatedSide(
            heads, stream.head
        )


def rotation_plan(
    source: Source, asked: Rotations | None = None, *, limits: Limits | None = None
) -> CheckpointPlan:
    """Return the plan that rotates ``source``, a checkpoint of floats.

    Raises UnsupportedError for a model whose residual stream is not known or cannot be rotated;
    CheckpointError for a source that is quantized, damaged or an adapter, a block that does not divide the
    stream, and limits that are too small for a block of rows; SchemeError for a bad seed.
    """
    asked, limits, codec = asked or Rotations(), limits or Limits.default(), DEFAULT
    require_model(source)
    floats = unquantized(source)
    entries, config = source.entries, source.config or {}
    stream = stream_of(entries, config)
    sides = asked.of(stream)
    origins = [*_origins(floats, stream, sides, asked)]
    actions = _actions(floats, stream, origins, asked)
    placements = Placements(source, actions, codec)
    limits = limits.reserve(entries, placements.by_name)
    texts, _ = index_and_config(floats, actions.decisions, placements, codec)
    texts[CONFIG] = readable(Text.of(with_members(str(texts[CONFIG]), _members(stream, config, asked))))
    companions = [path for path in source.companions if str(path) not in (*texts, MANIFEST)]
    plan = CheckpointPlan(
        source=source, codec=codec, recipe=_recipe(sides, asked), selection=Selection(),
        decisions=actions.decisions, placements=placements, texts=texts, limits=limits,
        notes=(*source.notes, *_notes(stream, sides, entries, origins)),
        companions={path: stamp(source.root / path).size for path in companions},
    )  # fmt: skip
    for item in kinds_of(plan.worked):
        tile_shape(item, limits)
    return plan


def _origins(
    floats: Floats, stream: Stream, sides: tuple[RotatedSide, RotatedSide], asked: Rotations
) -> Iterator[Origin]:
    """Yield what is written as other floats: matrices that are rotated, and what changes its dtype."""
    entries = floats.source.entries
    for entry in entries.values():
        role = stream.roles.get(entry.name)
        if role is None and entry.dtype in WEIGHT_DTYPES and asked.dtype not in (None, entry.dtype):
            yield _made(entry, entry, None, asked)
        elif role is not None and not role.is_norm and not _is_tied(entry, stream):
            yield _made(entry, entry, _folded(role, stream, sides, entries), asked)
    if stream.tied:
        name = f"{HEAD}{WEIGHT}"
        folded = _folded(stream.roles[name], stream, sides, entries)
        near = entries[f"{EMBEDDING}{WEIGHT}"]
        yield _made(replace(near, name=name), near, folded, asked)


def _is_tied(entry: TensorEntry, stream: Stream) -> bool:
    """Return whether a tensor is a head that models do not read, as they tie it to the embedding."""
    return stream.tied and entry.name == f"{HEAD}{WEIGHT}"


def _made(entry: TensorEntry, of: TensorEntry, folded: Folded | None, asked: Rotations) -> Origin:
    """Return a tensor that is made of another one."""
    dtype = asked.dtype or of.dtype
    nbytes = math.prod(of.shape) * TORCH_DTYPES[dtype].itemsize
    raw = of if (dtype, entry.name) != (of.dtype, of.name) else None
    return Origin(entry=replace(entry, dtype=dtype, nbytes=nbytes), raw=raw, folded=folded)


def _folded(role: Role, stream: Stream, sides: tuple[RotatedSide, RotatedSide], entries: Entries) -> Folded:
    of_stream, of_heads = sides
    values = of_heads if role.of_heads else None
    return Folded(
        inputs=of_stream if role.reads else values if role.writes else None,
        outputs=of_stream if role.writes else values,
        norm=None if role.norm is None else entries[role.norm], one=stream.one,
    )  # fmt: skip


def _actions(floats: Floats, stream: Stream, origins: list[Origin], asked: Rotations) -> Actions:
    """Return the tensors by action; norms that were folded are written anew."""
    entries = floats.source.entries
    norms = [entries[name] for name, role in stream.roles.items() if role.is_norm]
    added = []
    for norm in norms:
        dtype = TORCH_DTYPES[asked.dtype or norm.dtype]
        value = torch.full(norm.shape, 1 - stream.one, dtype=dtype)
        added.append(NewTensor(norm.name, norm, value).origin)
    written = {origin.entry.name for origin in (*origins, *added)}
    kept = [e for e in entries.values() if e.name not in written and not _is_tied(e, stream)]
    decisions = (_decision(entry, stream, asked) for entry in entries.values())
    return Actions(
        floats=floats, decisions=compact(entries, decisions), staying=(), restored=tuple(origins),
        kept=kept, copies={}, added=tuple(added),
    )  # fmt: skip


def _decision(entry: TensorEntry, stream: Stream, asked: Rotations) -> TensorDecision:
    role = stream.roles.get(entry.name)
    if role is None:
        changed = entry.dtype in WEIGHT_DTYPES and asked.dtype not in (None, entry.dtype)
        reason = f"no part in the residual stream, {'in another dtype' if changed else 'copied'}"
        return TensorDecision(entry=entry, layer=None, why=Why.DEFAULT, reason=reason)
    return TensorDecision(entry=entry, layer=None, why=Why.ROTATED, reason=_reason(role))


def _reason(role: Role) -> str:
    if role.is_norm:
        return "a norm, folded into what reads it"
    sides = (("reads", role.reads), ("writes", role.writes))
    does = " and ".join(verb for verb, there in sides if there)
    heads = "the values of heads"
    if not does:
        return heads
    return f"{does} the residual stream" + (f", and {heads} on its other side" if role.of_heads else "")


def _recipe(sides: tuple[RotatedSide, RotatedSide], asked: Rotations) -> RecipeText:
    """Return what was asked for in words, which tell one run from another."""
    stream, heads = (str(side.rotation) for side in sides)
    return RecipeText(text=f"rotate: {stream}, heads {heads}, {asked.dtype or 'dtypes kept'}", name="rotate")


def _members(stream: Stream, config: Mapping[str, Any], asked: Rotations) -> dict[str, Any]:
    """Return what config.json says otherwise."""
    found: dict[str, Any] = {_UNTIED: False} if stream.tied else {}
    if asked.dtype is not None:
        named = next(name for name, spelled in FLOATS.items() if spelled == asked.dtype)
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        found |= dict.fromkeys(keys, named)
    return found


def _notes(
    stream: Stream, sides: tuple[RotatedSide, RotatedSide], entries: Entries, origins: list[Origin]
) -> Iterator[str]:
    of_stream, of_heads = (side.rotation for side in sides)
    blocks = count(stream.width // of_stream.size, "block")
    yield (
        f"the residual stream of {stream.width} numbers is rotated in {blocks} of {of_stream.size}, the "
        f"values of heads of {stream.head} in blocks of {of_heads.size}, signs from seed {of_stream.seed}"
    )
    if stream.tied:
        size = next(o.entry.nbytes for o in origins if o.entry.name == f"{HEAD}{WEIGHT}")
        more = "" if f"{HEAD}{WEIGHT}" in entries else f", which adds {size_of(size)}"
        yield (
            f"{HEAD} was tied to the embedding and is written apart{more}: the last norm is folded into it "
            f"alone; config.json says {_UNTIED} false"
        )
