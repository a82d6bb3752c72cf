"""Tensors of a checkpoint by action: quantized, copied, dequantized or omitted."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...codecs.protocol import Codec, LayerScheme
from ...columns import LazySequence
from ...errors import CheckpointError, option, printable
from ..choose.decisions import TensorDecision, compact, describe, nothing_selected
from ..choose.expert_matrices import matrices
from ..choose.selection import Why
from ..read.storage import shown
from ..read.tensor_entries import TensorEntry
from .carried_scales import NOTHING, Replacements
from .float_view import Floats
from .origin import Origin


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
    restored: tuple[Origin, ...]
    kept: Sequence[TensorEntry]
    copies: Mapping[str, str]
    added: tuple[Origin, ...] = ()
    mixture: str | None = None

    @staticmethod
    def of(
        floats: Floats, decisions: Sequence[TensorDecision], tied: Mapping[str, str], *, every: bool,
        more: Replacements = NOTHING,
    ) -> Actions:  # fmt: skip
        """Return the actions for ``decisions``.

        tied: heads that are copies of an embedding. every: whether layers that are quantized already and not
        anew are written as floats. more: what is written besides, and in
        the place of what.
        """
        origins, entries = floats.origins, floats.source.entries
        held, folded = list[TensorDecision](), list[TensorDecision]()
        plain, copies = array("I"), dict[str, str]()
        for number, decision in enumerate(decisions):
            name = decision.entry.name
            if decision.quantized:
                continue
            if name in origins:
                (held if origins[name].layer is not None else folded).append(decision)
            elif name in tied:
                copies[name] = tied[name]
            elif name not in more.gone:
                plain.append(number)
        staying = () if every else tuple(held)
        codes = [entry for d in staying for entry in origins[d.entry.name].stored]
        alone = not any(d.quantized for d in decisions)
        restored = (*folded, *held) if every else folded
        words = {d.entry.name: _folded(origins[d.entry.name]) for d in folded}
        words |= {d.entry.name: f"decoded to {d.entry.dtype}" if every else "with its codes" for d in held}
        said = (
            replace(d, reason=more.gone[d.entry.name])
            if d.entry.name in more.gone
            else _with_words(d, words.get(d.entry.name), alone=alone)
            for d in decisions
        )
        return Actions(
            floats=floats, staying=staying, copies=copies, decisions=compact(entries, said),
            added=more.added,
            restored=tuple(origins[d.entry.name] for d in restored),
            kept=LazySequence(
                len(plain) + len(codes),
                lambda n: entries.at(plain[n]) if n < len(plain) else codes[n - len(plain)],
            ),
        )  # fmt: skip

    @staticmethod
    def copying(floats: Floats, added: Sequence[Origin]) -> Actions:
        """Return the actions that copy all tensors of ``floats`` and add some.

        added: takes the place of the tensor of its name, where there is one.
        """
        entries = floats.source.entries
        new = {origin.entry.name for origin in added}
        said = (
            TensorDecision(
                entry=entry, layer=None, why=Why.DEFAULT,
                reason="trained" if entry.name in new else "copied",
            )
            for entry in entries.values()
        )  # fmt: skip
        kept = array("I", (n for n, entry in enumerate(entries.values()) if entry.name not in new))
        return Actions(
            floats=floats, decisions=compact(entries, said), staying=(), restored=(), copies={},
            kept=LazySequence(len(kept), lambda n: entries.at(kept[n])), added=tuple(added),
        )  # fmt: skip

    @property
    def quantized(self) -> Iterator[tuple[TensorEntry, LayerScheme, str]]:
        """Quantized tensors, their schemes and methods."""
        return ((d.entry, d.layer, d.method) for d in self.decisions if d.layer is not None)

    def rewrite(self, codec: Codec) -> bool:
        """Return whether all quantized weights keep the layout that they have."""
        layers = ((self.floats.origin(entry).layer, to) for entry, to, _ in self.quantized)
        same = (was is not None and (was.codec, was.layer.layout) == (codec, to.layout) for was, to in layers)
        return not self.restored and not self._moved(codec) and all(same)

    def _moved(self, codec: Codec) -> bool:
        """Return whether ``codec`` writes another kind of file than the source has."""
        return self.floats.source.container.name != codec.container

    def require_sense(self, codec: Codec, *, every: bool) -> None:
        """Raise CheckpointError for a plan without work, or without a valid configuration.

        codec: what the files are written in. every: whether codes that are kept otherwise were to be decoded.
        """
        written = self.restored or (every and self._moved(codec))
        if next(self.quantized, None) is None and not written:
            if every:
                place = shown(self.floats.source.root)
                raise CheckpointError(f"{place} holds no codes to dequantize; pass a quantized checkpoint")
            raise CheckpointError(nothing_selected(self.decisions))
        if self.staying and not (codec.keeps_codes and codec.claims(self.floats.config or {})):
            theirs = (self.floats.config or {}).get("quant_method")
            raise CheckpointError(
                f"{len(self.staying)} layers would keep their {theirs} codes, such as "
                f"{describe(self.staying[0])}, "
                f"but no configuration can name them together with {codec.name}; pass "
                f"{option('dequantize_kept', True)} to "
                "write them as floats"
            )

    def notes(self) -> list[str]:
        """Return sentences about what is left out and what keeps its codes."""
        notes = [
            f"{printable(head)} is left out: config.json ties it to {printable(embedding)}, which is the same"
            for head, embedding in self.copies.items()
        ]
        carried = {origin.entry.name.rpartition(".")[0] for origin in self.added}
        scaled = (origin for e, _, _ in self.quantized if (origin := self.floats.origin(e)).input_scales)
        left = (
            origin
            for origin in scaled
            if carried.isdisjoint(
                matrix.module for matrix in matrices(self.floats.source.entries[origin.entry.name])
            )
        )
        gone = [s.name for origin in itertools.chain(left, self.restored) for s in origin.input_scales]
        if gone:
            notes.append(f"{len(gone)} scales of quantized inputs are left out, such as {printable(gone[0])}")
        if self.staying:
            example = describe(self.staying[0])
            notes.append(f"{len(self.staying)} layers keep the codes that they have, such as {example}")
        return notes


def _folded(origin: Origin) -> str:
    """Return the description of a change to a tensor of floats."""
    return "gathered" if origin.folded is None else origin.folded.action


def _with_words(decision: TensorDecision, words: str | None, *, alone: bool) -> TensorDecision:
    """Append the action on its codes to, or as, a decision's reason."""
    if words is None:
        return decision
    reason = words if alone else f"{decision.reason}, {words}"
    return replace(decision, reason=reason)
