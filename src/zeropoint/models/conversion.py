"""What became of a model and of each of its layers, to be printed."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import size_of
from ..recipes import Assignment, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What became of one layer.

    gives: its schemes, or None with the reason why it was left alone. nbytes: of its weights before and now;
    those that are tied to an earlier layer's, whose name is ``tied_to``, count there. error: root of the
    squared error over the squared weights, NaN where these are not known.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    gives: Assignment | None
    reason: str
    nbytes: tuple[int, int]
    error: float
    tied_to: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        facts = f"{self.name or 'model'} ({f'{self.type} {shape}'.strip()})"
        return f"{facts}: {self._fate}" + ("" if self._told is None else f", error {self.error:.4f}")

    @property
    def _fate(self) -> str:
        if self.gives is None:
            return f"kept, {self.reason}"
        if self.gives.weight is None:
            return f"{self.gives}"
        if self.tied_to:
            return f"{self.gives}; its weight is that of {self.tied_to}"
        share = self.nbytes[1] / self.nbytes[0] if self.nbytes[0] else 0.0
        return f"{self.gives}; {share:.1%} of the original size"

    @property
    def _told(self) -> float | None:
        """The error, where it is told of the layer."""
        packed = self.gives is not None and self.gives.weight is not None and not self.tied_to
        return self.error if packed and not math.isnan(self.error) else None

    def _family(self) -> tuple[str, str]:
        """Return what layers that are told of in one line have in common: their names but for numbers."""
        return _NUMBER.sub("*", self.name), str(replace(self, name="", error=math.nan))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion:
    """A converted model, and what became of each layer that has parameters, in the model's order."""

    model: nn.Module
    layers: tuple[Converted, ...]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of all these weights before and now; tied ones count once."""
        return sum(layer.nbytes[0] for layer in self.layers), sum(layer.nbytes[1] for layer in self.layers)

    def __str__(self) -> str:
        before, now = self.nbytes
        families: dict[tuple[str, str], list[Converted]] = {}
        for layer in self.layers:
            families.setdefault(layer._family(), []).append(layer)
        lines = [
            *itertools.chain.from_iterable(map(_lines, families.values())),
            f"weights: {size_of(before)} -> {size_of(now)} ({now / max(1, before):.1%})",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def save_checkpoint(self, directory: Path | str, **options: Any) -> Any:
        """Write the model as :func:`zeropoint.save_checkpoint` does, with its options."""
        # The one import upwards: whoever holds a result looks here for what to do with it.
        from ..checkpoint.model.saving import save_checkpoint

        return save_checkpoint(self.model, directory, **options)


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_FOLDED = 3
"""Layers of one kind from which on one line tells of all of them."""


def _lines(family: list[Converted]) -> list[str]:
    """Return what is told of layers that differ in numbers of their names alone."""
    if len(family) < _FOLDED:
        return [str(layer) for layer in family]
    first = family[0]
    name = _NUMBER.sub("*", first.name)
    shape = "x".join(map(str, first.shape))
    errors = [layer._told for layer in family if layer._told is not None]
    told = f", error {min(errors):.4f} to {max(errors):.4f}" if errors else ""
    return [f"{name} ({len(family)} x {f'{first.type} {shape}'.strip()}): {first._fate}{told}"]


def weight_bytes(module: nn.Module, counted: set[int]) -> int:
    """Return the bytes of a layer's own weights, biases left out, that are not counted yet; count them.

    Those of a parametrized layer are what its weights are computed from.
    """
    own = module.parameters(recurse=is_parametrized(module))
    weights = [p for p in own if p.ndim > 1 and id(p) not in counted]
    counted.update(map(id, weights))
    return sum(weight.nbytes for weight in weights)


def kept_layer(module: nn.Module, decision: Decision, counted: set[int]) -> Converted:
    """Return what is told of a layer that a decision leaves alone; ``counted`` as in :func:`weight_bytes`."""
    subject, nbytes = decision.subject, weight_bytes(module, counted)
    return Converted(
        name=subject.name,
        type=subject.type,
        shape=subject.shape,
        gives=None,
        reason=decision.rule.reason,
        nbytes=(nbytes, nbytes),
        error=0.0,
    )
