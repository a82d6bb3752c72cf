"""Notes of a plan: omitted tensors, lost weights, and configuration files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...architectures import is_expert, is_transposed
from ...codecs.protocol import Codec
from ...errors import count, printable
from ...loaded_names import lacks_single_experts, loaded_parameters, unknown_names
from ..read.config_text import WEIGHTS_ONLY_CONFIG
from ..read.source import Source
from .decisions import TensorDecision, describe, remarks
from .selection import module_of
from .tied import tied_heads


def omission_notes(names: Collection[str], codec: Codec) -> list[str]:
    """Return a note on tensors that a codec's files omit, if any."""
    if not names:
        return []
    example, engine = printable(min(names)), codec.usual[0]
    return [f"{count(len(names), 'tensor')} left out, for which {engine} has no place, such as {example}"]


def source_notes(source: Source, decisions: Sequence[TensorDecision]) -> list[str]:
    """Return notes on tied heads, lost weights, and default decisions."""
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
    transposed = [d for d in decisions if d.quantized and is_transposed(module_of(d.entry.name), family)]
    if transposed:
        notes.append(
            f"{len(transposed)} weights are stored transposed, and their blocks run along the outputs, such "
            "as "
            f"{describe(transposed[0])}"
        )
    unknown = unknown_names(family)
    if unknown is not None and any(not d.quantized for d in decisions):
        notes.append(
            f"layers that are kept have the names of the files alone in the configuration: {unknown}"
        )
    alone = next((n for n in (d.entry.name for d in decisions) if _is_lost(n, family)), None)
    if alone is not None and not any(d.quantized for d in decisions):
        notes.append(
            f"transformers does not load {printable(alone)}: it takes the experts of this family as one "
            "tensor, and here they are single matrices"
        )
    return [*notes, *remarks(decisions)]


def _is_lost(name: str, family: Mapping[str, Any]) -> bool:
    """Return whether transformers has no module for a single expert."""
    return is_expert(name) and loaded_parameters(name, family) == (name,) and lacks_single_experts(family)


def configuration_notes(texts: Collection[str]) -> Iterator[str]:
    """Yield notes on a written configuration without a config.json."""
    if WEIGHTS_ONLY_CONFIG in texts:
        yield f"no config.json: the configuration is written to {WEIGHTS_ONLY_CONFIG}"
