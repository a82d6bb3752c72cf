"""Tensors by action, quantized, copied, dequantized or omitted, with notes."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...architectures import is_expert, is_input_embedding
from ...codecs.protocol import Codec, LayerScheme
from ...columns import LazySequence
from ...errors import CheckpointError, count, option, printable
from ...loaded_names import lacks_single_experts, loaded_parameters, unknown_names
from ..read.config_text import WEIGHTS_ONLY_CONFIG
from ..read.source import Source
from ..read.storage import shown
from ..read.tensor_entries import TensorEntry
from .carried_scales import NOTHING, Replacements
from .decisions import TensorDecision, compact, describe, nothing_selected, remarks
from .float_view import Floats
from .folded import Folded
from .row_reader import RowReader
from .selection import DequantizePolicy, Why, module_of
from .tensor_matrices import matrices
from .tied import tied_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The tensors of ``floats`` by action.

    decisions: with the reasons in full. staying: those about layers that keep their codes. restored: what is
    written as floats. kept: tensors of the files that are copied. copies: heads that are left out, with the
    embedding whose bytes they have. added: tensors that the source has not. mixture: what gave weights their
    types, if one did.
    """

    floats: Floats
    decisions: Sequence[TensorDecision]
    staying: tuple[TensorDecision, ...]
    restored: tuple[RowReader, ...]
    kept: Sequence[TensorEntry]
    copies: Mapping[str, str]
    added: tuple[RowReader, ...] = ()
    mixture: str | None = None

    @staticmethod
    def of(
        floats: Floats,
        decisions: Sequence[TensorDecision],
        tied: Mapping[str, str],
        *,
        every: bool,
        more: Replacements = NOTHING,
    ) -> Actions:
        """Return the actions for ``decisions``.

        tied: heads that are copies of an embedding. every: whether layers that are quantized already and not
        anew are written as floats. more: what is written besides, and in
        the place of what.
        """
        readers, entries = floats.readers, floats.source.entries
        held, folded = list[TensorDecision](), list[TensorDecision]()
        plain, copies = array("I"), dict[str, str]()
        for number, decision in enumerate(decisions):
            name = decision.entry.name
            if decision.quantized:
                continue
            if name in readers:
                (held if readers[name].layer is not None else folded).append(decision)
            elif name in tied:
                copies[name] = tied[name]
            elif name not in more.gone:
                plain.append(number)
        staying = () if every else tuple(held)
        codes = [entry for d in staying for entry in readers[d.entry.name].quantized_tensors]
        alone = not any(d.quantized for d in decisions)
        restored = (*folded, *held) if every else folded
        words = {d.entry.name: _change(readers[d.entry.name]) for d in folded}
        words |= {d.entry.name: f"decoded to {d.entry.dtype}" if every else "with its codes" for d in held}
        said = (
            replace(d, reason=more.gone[d.entry.name])
            if d.entry.name in more.gone
            else _with_words(d, words.get(d.entry.name), alone=alone)
            for d in decisions
        )
        return Actions(
            floats=floats,
            staying=staying,
            copies=copies,
            decisions=compact(entries, said),
            added=more.added,
            restored=tuple(readers[d.entry.name] for d in restored),
            kept=LazySequence(
                len(plain) + len(codes),
                lambda n: entries.at(plain[n]) if n < len(plain) else codes[n - len(plain)],
            ),
        )

    @staticmethod
    def copying(floats: Floats, added: Sequence[RowReader]) -> Actions:
        """Return the actions that copy all tensors of ``floats`` and add some.

        added: takes the place of the tensor of its name, where there is one.
        """
        entries = floats.source.entries
        new = {reader.entry.name for reader in added}
        said = (
            TensorDecision(
                entry=entry, layer=None, why=Why.DEFAULT, reason="trained" if entry.name in new else "copied"
            )
            for entry in entries.values()
        )
        kept = array("I", (n for n, entry in enumerate(entries.values()) if entry.name not in new))
        return Actions(
            floats=floats,
            decisions=compact(entries, said),
            staying=(),
            restored=(),
            copies={},
            kept=LazySequence(len(kept), lambda n: entries.at(kept[n])),
            added=tuple(added),
        )

    @property
    def quantized(self) -> Iterator[tuple[TensorEntry, LayerScheme, str]]:
        """Quantized tensors, their schemes and methods."""
        return ((d.entry, d.layer, d.method) for d in self.decisions if d.layer is not None)

    def rewrite(self, codec: Codec) -> bool:
        """Return whether all quantized weights keep the layout that they have."""
        layers = ((self.floats.reader(entry).layer, to) for entry, to, _ in self.quantized)
        same = (was is not None and (was.codec, was.layer.layout) == (codec, to.layout) for was, to in layers)
        return not self.restored and not self._moved(codec) and all(same)

    def _moved(self, codec: Codec) -> bool:
        """Return whether ``codec`` writes another kind of file than the source has."""
        return self.floats.source.container.name != codec.container

    def require_sense(self, codec: Codec, policy: DequantizePolicy) -> None:
        """Raise CheckpointError for a plan without work, or without a valid configuration.

        codec: what the files are written in. policy: what becomes of codes that are kept otherwise.
        """
        every = policy is DequantizePolicy.EVERY
        written = self.restored or (every and self._moved(codec))
        if next(self.quantized, None) is None and not written:
            if every:
                place = shown(self.floats.source.root)
                raise CheckpointError(f"{place} holds no codes to dequantize; pass a quantized checkpoint")
            raise CheckpointError(nothing_selected(self.decisions))
        if self.staying and not (codec.keeps_codes and codec.claims(self.floats.config or {})):
            theirs = (self.floats.config or {}).get("quant_method")
            kept = option("dequantize_kept", True)
            remedy = f"pass {kept} to write them as floats"
            if policy.converts:
                first = option("dequantize_first", True)
                remedy = f"zeropoint quantize with {first} and {kept} writes them as floats"
            raise CheckpointError(
                f"{len(self.staying)} layers would keep their {theirs} codes, such as "
                f"{describe(self.staying[0])}, but no configuration can name them together with "
                f"{codec.name}; {remedy}"
            )

    def notes(self) -> list[str]:
        """Return sentences about what is left out and what keeps its codes."""
        notes = [
            f"{printable(head)} is left out: config.json ties it to {printable(embedding)}, which is the same"
            for head, embedding in self.copies.items()
        ]
        carried = {reader.entry.name.rpartition(".")[0] for reader in self.added}
        scaled = (reader for e, _, _ in self.quantized if (reader := self.floats.reader(e)).input_scales)
        left = (
            reader
            for reader in scaled
            if carried.isdisjoint(
                matrix.module for matrix in matrices(self.floats.source.entries[reader.entry.name])
            )
        )
        gone = [s.name for reader in itertools.chain(left, self.restored) for s in reader.input_scales]
        if gone:
            notes.append(f"{len(gone)} scales of quantized inputs are left out, such as {printable(gone[0])}")
        if self.staying:
            example = describe(self.staying[0])
            notes.append(f"{len(self.staying)} layers keep the codes that they have, such as {example}")
        return notes


def _change(reader: RowReader) -> str:
    """Return the description of a change to a tensor of floats."""
    return reader.fold.action if isinstance(reader, Folded) else "gathered"


def _with_words(decision: TensorDecision, words: str | None, *, alone: bool) -> TensorDecision:
    """Append the action on its codes to, or as, a decision's reason."""
    if words is None:
        return decision
    reason = words if alone else f"{decision.reason}, {words}"
    return replace(decision, reason=reason)


def omission_notes(names: Collection[str], codec: Codec) -> list[str]:
    """Return a note on tensors that a codec's files omit, if any."""
    if not names:
        return []
    why = codec.model_format.elsewhere or f"for which {codec.usual[0]} has no place"
    return [f"{count(len(names), 'tensor')} left out, {why}, such as {printable(min(names))}"]


def source_notes(
    source: Source, decisions: Sequence[TensorDecision], omitted: Collection[str] = ()
) -> list[str]:
    """Return notes on tied heads, lost weights, and default decisions.

    omitted: names of tensors that the files omit.
    """
    notes = []
    heads = tied_heads(source)
    if heads and not any(is_input_embedding(module_of(name)) for name in omitted):
        notes.append(f"the head ({', '.join(heads)}) is tied to the embedding and stays as that is")
    if (source.config or {}).get("tie_word_embeddings") is True:
        notes += [
            f"{printable(d.entry.name)} is quantized, but config.json ties it to the embedding"
            for d in decisions
            if d.quantized and module_of(d.entry.name).endswith("lm_head")
        ]
    family = source.config or {}
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
