"""Plans that rotate the residual stream of a model and its heads.

What comes out is an ordinary model of the same architecture, whose logits equal the source's but for
rounding (rotated.py). The rotations are block Hadamard matrices with random signs, which spread outliers over
their block.

Source: Ashkboos et al., QuaRot, arXiv:2404.00456, without the rotations that a model would do itself; Liu et
al., SpinQuant, arXiv:2405.16406, whose R1 and R2 these are, there learned.
"""

from __future__ import annotations

from ...codecs.registry import DEFAULT
from ...methods.rotate import STEP, ModelRotation
from ..read.source import Source
from ..read.tensor_entries import TensorEntry
from .actions import Actions
from .checkpoint_plan import CheckpointPlan, kinds_of
from .config_and_index import companions, index_and_config
from .decisions import TensorDecision, compact
from .float_view import unquantized
from .limits import Limits
from .output_table import Outputs
from .output_tensors import tile_shape
from .recipe import RecipeText
from .residual_stream import Role, Stream, stream_of
from .rotated import require_unrotated, rotated_floats, rotation_notes, sides_of
from .selection import WEIGHT_DTYPES, Why, require_model


def rotation_plan(
    source: Source, rotation: ModelRotation = STEP, *, dtype: str | None = None, limits: Limits | None = None
) -> CheckpointPlan:
    """Return the plan that rotates ``source``, a checkpoint of floats.

    dtype: of all floats as safetensors spells it; None for that which each has. Raises UnsupportedError for a
    model whose residual stream is not known or cannot be rotated; CheckpointError for a source that is
    quantized, damaged or an adapter, a block that does not divide the stream, and limits that are too small
    for a block of rows; SchemeError for a bad seed.
    """
    limits = limits or Limits.default()
    require_model(source)
    require_unrotated(source)
    before = unquantized(source).source
    floats = rotated_floats(unquantized(source), rotation, dtype)
    stream = stream_of(before.entries, before.config or {})
    decisions = (_decision(entry, stream, dtype) for entry in before.entries.values())
    actions = Actions(
        floats=floats,
        decisions=compact(before.entries, decisions),
        staying=(),
        copies={},
        restored=tuple(floats.readers.values()),
        kept=[entry for entry in floats.source.entries.values() if entry.name not in floats.readers],
    )
    outputs = Outputs(source, actions, DEFAULT)
    limits = limits.reserve(before.entries, outputs.by_name)
    texts, _ = index_and_config(outputs)
    plan = CheckpointPlan(
        outputs=outputs,
        recipe=_recipe(rotation, stream, dtype),
        texts=texts,
        companions=companions(outputs, texts),
        notes=(*source.notes, *rotation_notes(floats, before, rotation)),
        limits=limits,
        rotation=rotation,
    )
    for item in kinds_of(plan.processed):
        tile_shape(item, limits)
    return plan


def _decision(entry: TensorEntry, stream: Stream, dtype: str | None) -> TensorDecision:
    role = stream.roles.get(entry.name)
    if role is None:
        changed = entry.dtype in WEIGHT_DTYPES and dtype not in (None, entry.dtype)
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


def _recipe(rotation: ModelRotation, stream: Stream, dtype: str | None) -> RecipeText:
    """Return the rotation request in words, which distinguish runs."""
    whole, heads = (str(side.rotation) for side in sides_of(rotation, stream))
    return RecipeText(text=f"rotate: {whole}, heads {heads}, {dtype or 'dtypes kept'}", name="rotate")
