"""Chains: steps that move the target of a weight, one after the other, and the method that rounds it.

Spelled ``STEP+...+METHOD``, such as ``shift+gptq`` or ``shift+descent``. Each step says where in a
chain it stands, and why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import RecipeError, UnsupportedError
from ..schemes import Scheme
from ..stats import Accumulator
from .adaround import METHOD as ADAROUND
from .descent import METHOD as DESCENT
from .gptq import METHOD as GPTQ
from .gptq import ErrorFeedback
from .method import NO_DATA, Bound, LayerData, LayerResult, Scope
from .registry import steps
from .step import Step

_TARGET_BYTES = 24
"""Memory of a value of the target, of its change, and of a product on the way, in float64."""
ENDS = {end.name: end for end in (GPTQ, DESCENT, ADAROUND)}
"""Methods that round a target of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChain:
    """Steps, and the method that rounds their target."""

    steps: tuple[Step, ...]
    end: ErrorFeedback

    @property
    def name(self) -> str:
        """Return the spelling."""
        return "+".join([*(step.name for step in self.steps), self.end.name])

    @property
    def formula(self) -> str:
        """Return the formulas, in order."""
        return "; then ".join([*(step.formula for step in self.steps), self.end.formula])

    @property
    def source(self) -> str:
        """Return the sources, in order."""
        return "; ".join([*(step.source for step in self.steps), self.end.source])

    @property
    def needs(self) -> Mapping[str, Callable[[int], Accumulator]]:
        """Return what its steps and its end need."""
        found = [*(step.takes for step in self.steps), self.end.takes]
        return {need: make for takes in found for need, make in takes.items()}

    @property
    def takes(self) -> Mapping[str, Callable[[int], Accumulator]]:
        """Return what it needs."""
        return self.needs

    def scope(self, scheme: Scheme) -> Scope:
        """See its end."""
        return self.end.scope(scheme)

    def refusal(self, scheme: Scheme) -> str | None:
        """See its end."""
        return self.end.refusal(scheme)

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (as the protocol)
        """Return none: the bound of its end is of the target, which no file holds."""
        return Bound.NONE

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of a value: that of the end, and of targets."""
        return self.end.value_bytes(scheme) + _TARGET_BYTES

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return codes of ``weight`` that come close to its target; raises what steps and the end raise."""
        refusal = self.refusal(scheme)
        if refusal is not None:
            raise UnsupportedError(refusal)
        if weight.numel() == 0:
            return self.end.quantize(weight, scheme, data)
        target, notes = weight.double(), list[str]()
        for step in self.steps:
            moved = step(weight, target, data, scheme)
            target, notes = moved.target, [*notes, f"{step.name} {moved.note}".strip()]
        return self.end.solve(weight, target, scheme, data, notes=tuple(notes))


def spelled(text: str) -> MethodChain | None:
    """Return the chain that ``text`` spells, or None for other texts.

    Raises RecipeError for a chain in another order, with a step twice, and with another end.

    >>> spelled("shift+gptq").name
    'shift+gptq'
    """
    *names, last = text.split("+")
    if not names or any(name not in steps() for name in names):
        return None
    end = ENDS.get(last)
    if end is None:
        ends = " or ".join(ENDS)
        raise RecipeError(
            f"method {text!r} ends with {last!r}, and steps end with {ends}: {'+'.join(names)}+gptq"
        )
    for before, after in itertools.pairwise(steps()[name] for name in names):
        if before.rank >= after.rank:
            right = "+".join(sorted({*names}, key=lambda name: steps()[name].rank))
            reason = f"{after.name} stands before {before.name}, since {after.reason}"
            raise RecipeError(f"method {text!r}: {reason}; write {right}+{last}")
    return MethodChain(steps=tuple(steps()[name] for name in names), end=end)
