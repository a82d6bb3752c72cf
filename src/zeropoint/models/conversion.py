"""Results of model conversion: one printable record per layer."""

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
from ..shown import repr_html


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The record of one layer.

    Args:
        name: dotted name of the layer.
        type: its class.
        shape: of its weight.
        gives: its schemes, or None with the reason why it was kept.
        reason: why it was kept.
        nbytes: of its weights before and now; those that are tied to an earlier layer's, whose name is
            ``tied_to``, count there.
        error: root of the squared error over the squared weights, NaN where these are not known.
        tied_to: name of an earlier layer with the same weight.
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
        error = self._printed_error
        return f"{facts}: {self._outcome}" + ("" if error is None else f", error {error:.4f}")

    @property
    def _outcome(self) -> str:
        if self.gives is None:
            return f"kept, {self.reason}"
        if self.gives.weight is None:
            return f"{self.gives}"
        if self.tied_to:
            return f"{self.gives}; its weight is that of {self.tied_to}"
        share = self.nbytes[1] / self.nbytes[0] if self.nbytes[0] else 0.0
        return f"{self.gives}; {share:.1%} of the original size"

    @property
    def _printed_error(self) -> float | None:
        """The error, where it is printed for the layer."""
        packed = self.gives is not None and self.gives.weight is not None and not self.tied_to
        return self.error if packed and not math.isnan(self.error) else None

    def _family(self) -> tuple[str, str]:
        """Return the report key of similar layers: names without numbers."""
        return _NUMBER.sub("*", self.name), str(replace(self, name="", error=math.nan))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion:
    """A converted model, and a record of each layer with parameters.

    Args:
        model: the converted model.
        layers: records of all layers that have parameters, in the model's order.
    """

    model: nn.Module
    layers: tuple[Converted, ...]

    _repr_html_ = repr_html

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
        """Write the model as :func:`zeropoint.save_checkpoint` does, with its options.

        Args:
            directory: where files are written, made if absent.
            options: as for :func:`zeropoint.save_checkpoint`.

        Returns:
            What was written.
        """
        # The one import upwards: users of a result look here for what to do with it.
        from ..checkpoint.model.saving import save_checkpoint

        return save_checkpoint(self.model, directory, **options)


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_FOLDED = 3
"""Layers of one kind from which on one line describes all of them."""


def _lines(family: list[Converted]) -> list[str]:
    """Return the report lines of layers whose names differ in numbers."""
    if len(family) < _FOLDED:
        return [str(layer) for layer in family]
    first = family[0]
    name = _NUMBER.sub("*", first.name)
    shape = "x".join(map(str, first.shape))
    errors = [layer._printed_error for layer in family if layer._printed_error is not None]
    error = f", error {min(errors):.4f} to {max(errors):.4f}" if errors else ""
    return [f"{name} ({len(family)} x {f'{first.type} {shape}'.strip()}): {first._outcome}{error}"]


def weight_bytes(module: nn.Module, counted: set[int]) -> int:
    """Return uncounted bytes of a layer's weights, without biases; count them.

    A parametrized layer counts the tensors that its weights are computed from.
    """
    own = module.parameters(recurse=is_parametrized(module))
    weights = [p for p in own if p.ndim > 1 and id(p) not in counted]
    counted.update(map(id, weights))
    return sum(weight.nbytes for weight in weights)


def kept_layer(module: nn.Module, decision: Decision, counted: set[int]) -> Converted:
    """Return the report of a kept layer; ``counted``: see :func:`weight_bytes`."""
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
