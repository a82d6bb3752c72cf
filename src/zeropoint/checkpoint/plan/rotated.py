"""A checkpoint in a rotated space, and its record file.

Norms have a weight of one, matrices are rotated on the sides where they read or write the residual stream,
and a head that was tied to the embedding is a tensor of its own, since only the head takes in the last norm.
``zeropoint_rotated.json`` next to quantized weights says how, so that they can be compared with the source:

    {"zeropoint_rotated": 1, "rotation": "rotate64@7"}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...errors import CheckpointError, RecipeError, count, printable, size_of
from ...methods import method_named
from ...methods.rotate import ModelRotation, rotation_of
from ...ops.rotation import Rotation
from ...recipes import Quality, Recipe, method_in
from ..read.config_text import with_members
from ..read.source import Source
from ..read.storage import exists, read_small, shown
from ..read.tensor_entries import Entries, TensorEntry
from .float_view import Floats
from .folded import Fold, Folded, FoldedNorm, FoldedRotation, RotatedSide
from .recipe import RecipeText
from .residual_stream import EMBEDDING, HEAD, Role, Stream, stream_of
from .row_changes import Reordered, in_model_form
from .row_reader import RowReader, StoredFloats, with_dtype
from .selection import FLOATS, WEIGHT, WEIGHT_DTYPES

ROTATED = "zeropoint_rotated.json"
_VERSION, _MOST_BYTES = 1, 1 << 16
_UNTIED = "tie_word_embeddings"


def rotation_in(recipe: Recipe, text: RecipeText) -> ModelRotation | None:
    """Return the rotation that methods of a recipe begin with, or None.

    text: of the recipe, which has the method of a mixture. Raises RecipeError for two rotations.
    """
    given = [rule.gives.method for rule in (*recipe.rules, recipe.default) if rule.gives is not None]
    found: dict[ModelRotation, str] = {}
    for name in filter(None, given or [method_in(text.text)]):
        rotation = None if name in set(Quality) else rotation_of(method_named(name))
        if rotation is not None:
            found.setdefault(rotation, name)
    if len(found) > 1:
        one, other, *_ = found.values()
        raise RecipeError(
            f"methods {one} and {other} rotate the model in two ways, and it has one residual stream; give "
            "both the same rotation"
        )
    return next(iter(found), None)


def require_unrotated(source: Source) -> None:
    """Raise CheckpointError for a checkpoint with a rotation file."""
    done = saved_rotation(source)
    if done is not None:
        raise CheckpointError(
            f"{shown(source.root)} is rotated already, as its {ROTATED} says ({done.name}); leave the step "
            "out, or pass the original checkpoint"
        )


def rotated_floats(floats: Floats, rotation: ModelRotation, dtype: str | None = None) -> Floats:
    """Return a checkpoint of floats as it is rotated.

    dtype: of all floats as safetensors spells it; None for that which each has. Raises UnsupportedError for a
    model whose residual stream is not known or cannot be rotated; CheckpointError for a source that is
    quantized, and a block that does not divide the stream; SchemeError for a bad seed.
    """
    source, config = floats.source, floats.source.config or {}
    if floats.readers:
        raise CheckpointError(
            f"{shown(source.root)} is quantized, and a rotation takes floats; write these by zeropoint "
            "dequantize first"
        )
    stream = stream_of(source.entries, config)
    readers = {reader.entry.name: reader for reader in _readers(source.entries, stream, rotation, dtype)}
    entries = {entry.name: entry for entry in source.entries.values()}
    entries |= {name: reader.entry for name, reader in readers.items()}
    members = _members(stream, config, dtype)
    text = source.config_text
    made = replace(
        source,
        entries=Entries(entries.values()),
        config={**config, **members},
        config_text=None if text is None else with_members(text, members),
    )
    return replace(floats, source=made, readers=readers)


def _readers(
    entries: Entries, stream: Stream, rotation: ModelRotation, dtype: str | None
) -> Iterator[RowReader]:
    """Yield the changed tensors: rotated ones, and floats of another dtype."""
    sides, head = sides_of(rotation, stream), f"{HEAD}{WEIGHT}"
    for entry in entries.values():
        role = stream.roles.get(entry.name)
        if role is None and entry.dtype in WEIGHT_DTYPES and dtype not in (None, entry.dtype):
            yield _made(entry, entry, None, dtype)
        elif role is not None and not (stream.tied and entry.name == head):
            yield _made(entry, entry, _folded(role, stream, sides, entries), dtype)
    if stream.tied:
        # A head in the files that models do not read, as they tie it to the embedding, is passed over.
        near = entries[f"{EMBEDDING}{WEIGHT}"]
        yield _made(
            replace(near, name=head), near, _folded(stream.roles[head], stream, sides, entries), dtype
        )


def sides_of(rotation: ModelRotation, stream: Stream) -> tuple[RotatedSide, RotatedSide]:
    """Return the rotations of the stream and of head values.

    Raises CheckpointError for a block that does not divide the stream, SchemeError for a bad seed.
    """
    largest = stream.width & -stream.width
    block = largest if rotation.block is None else rotation.block
    if block < 1 or block & (block - 1) or stream.width % block:
        raise CheckpointError(
            f"block (={block}) must be a power of two that divides the hidden_size {stream.width}; use "
            f"{largest} or less"
        )
    heads = Rotation(size=stream.head & -stream.head, seed=rotation.seed)
    return (
        RotatedSide(Rotation(size=block, seed=rotation.seed), stream.width),
        RotatedSide(heads, stream.head),
    )


def _made(entry: TensorEntry, of: TensorEntry, fold: Fold | None, dtype: str | None) -> RowReader:
    """Return a tensor that is made of another one."""
    entry, stored = with_dtype(entry, dtype or of.dtype), in_model_form(StoredFloats(entry=of))
    return Reordered(entry=entry, of=stored) if fold is None else Folded(entry=entry, of=stored, fold=fold)


def _folded(role: Role, stream: Stream, sides: tuple[RotatedSide, RotatedSide], entries: Entries) -> Fold:
    if role.is_norm:
        return FoldedNorm(one=stream.one)
    of_stream, of_heads = sides
    values = of_heads if role.of_heads else None
    return FoldedRotation(
        inputs=of_stream if role.reads else values if role.writes else None,
        outputs=of_stream if role.writes else values,
        norm=None if role.norm is None else in_model_form(StoredFloats(entry=entries[role.norm])),
        one=stream.one,
    )


def _members(stream: Stream, config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the changed members of config.json."""
    found: dict[str, Any] = {_UNTIED: False} if stream.tied else {}
    if dtype is not None:
        named = next(name for name, spelled in FLOATS.items() if spelled == dtype)
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        found |= dict.fromkeys(keys, named)
    return found


def rotation_notes(
    floats: Floats, before: Source, rotation: ModelRotation, methods: Collection[str] = ()
) -> Iterator[str]:
    """Yield sentences about a rotated checkpoint, its source and methods."""
    stream = stream_of(before.entries, before.config or {})
    of_stream, of_heads = (side.rotation for side in sides_of(rotation, stream))
    blocks = count(stream.width // of_stream.size, "block")
    yield (
        f"the residual stream of {stream.width} numbers is rotated in {blocks} of {of_stream.size}, the "
        f"values of heads of {stream.head} in blocks of {of_heads.size}, signs from seed {of_stream.seed}"
    )
    if stream.tied:
        head = f"{HEAD}{WEIGHT}"
        size = floats.source.entries[head].nbytes
        more = "" if head in before.entries else f", which adds {size_of(size)}"
        yield (
            f"{HEAD} was tied to the embedding and is written apart{more}: the last norm is folded into it "
            f"alone; config.json says {_UNTIED} false"
        )
    others = sorted(name for name in methods if rotation_of(method_named(name)) is None)
    if others:
        yield (
            f"{rotation.name} rotates the whole model, so that weights under {', '.join(others)} are "
            "rotated, too"
        )


def rotation_text(rotation: ModelRotation) -> str:
    """Return the text of the file."""
    return json.dumps({"zeropoint_rotated": _VERSION, "rotation": rotation.name}, indent=1) + "\n"


def saved_rotation(source: Source) -> ModelRotation | None:
    """Return the rotation in the record file, or None.

    Raises CheckpointError for a damaged file.
    """
    path = source.root / ROTATED
    if source.given != source.root or not exists(path):
        return None
    data, _ = read_small(path, limit=_MOST_BYTES)
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("zeropoint_rotated") != _VERSION:
            raise ValueError("it does not say how the model is rotated")
        found = ModelRotation.spelled(str(document.get("rotation")))
        if found is None:
            raise ValueError(f"its rotation {printable(str(document.get('rotation')), limit=40)} is unknown")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown(path)} is damaged: {error}; quantize again") from error
    return found
