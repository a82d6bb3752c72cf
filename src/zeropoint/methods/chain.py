"""Chains: steps that move the target of a weight, one after the other, and the method that rounds it.

Spelled ``STEP+...+METHOD``, such as ``shift+gptq``. Each step says where in a chain it stands, and why.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

import torch

from ..errors import RecipeError, UnsupportedError
from ..schemes import Scheme
from ..stats import Accumulator
from .gptq import METHOD as GPTQ
from .method import NO_DATA, Bound, LayerData, LayerResult, Scope
from .step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Steps that move what GPTQ rounds to."""

    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """Return the spelling."""
        return "+".join([*(step.name for step in self.steps), GPTQ.name])

    @property
    def formula(self) -> str:
        """Return the formulas, in order."""
        return "; then ".join([*(step.formula for step in self.steps), GPTQ.formula])

    @property
    def source(self) -> str:
        """Return the sources, in order."""
        return "; ".join([*(step.source for step in self.steps), GPTQ.source])

    @property
    def needs(self) -> Mapping[str, Callable[[int], Accumulator]]:
        """Return what its steps and its end need."""
        found = [*(step.takes for step in self.steps), GPTQ.takes]
        return {need: make for takes in found for need, make in takes.items()}

    @property
    def takes(self) -> Mapping[str, Callable[[int], Accumulator]]:
        """Return what it needs."""
        return self.needs

    def scope(self, scheme: Scheme) -> Scope:
        """See its end."""
        return GPTQ.scope(scheme)

    def refusal(self, scheme: Scheme) -> str | None:
        """See its end."""
        return GPTQ.refusal(scheme)

    def bound(self, scheme: Scheme) -> Bound:
        """See its end."""
        return GPTQ.bound(scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of a value: that of the end, and of targets."""
        return GPTQ.value_bytes(scheme) + 24

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return codes of ``weight`` that come close to its target; raises what steps and the end raise."""
        refusal = self.refusal(scheme)
        if refusal is not None:
            raise UnsupportedError(refusal)
        if weight.numel() == 0:
            return GPTQ.quantize(weight, scheme, data)
        target, notes = weight.double(), list[str]()
        for step in self.steps:
            moved = step(weight, target, data)
            target, notes = moved.target, [*notes, f"{step.name} {moved.note}".strip()]
        return GPTQ.solve(weight, target, scheme, data, notes=tuple(notes))


@functools.cache
def steps() -> Mapping[str, Step]:
    """Return all steps by name.

    >>> "shift" in steps()
    True
    """
    package = __name__.rpartition(".")[0]
    modules = (
        import_module(f"{package}.{found.name}") for found in iter_modules(import_module(package).__path__)
    )
    found = (module.STEP for module in modules if hasattr(module, "STEP"))
    return {step.name: step for step in found}


def spelled(text: str) -> Chain | None:
    """Return the chain that ``text`` spells, or None for other texts.

    Raises RecipeError for a chain in another order, with a step twice, and with another end.

    >>> spelled("shift+gptq").name
    'shift+gptq'
    """
    *names, end = text.split("+")
    if not names or any(name not in steps() for name in names):
        return None
    chain = tuple(steps()[name] for name in names)
    if end != GPTQ.name:
        raise RecipeError(
            f"method {text!r} ends with {end!r}, and steps end with {GPTQ.name}: {'+'.join(names)}+gptq"
        )
    for before, after in itertools.pairwise(chain):
        if before.rank >= after.rank:
            right = "+".join(sorted(names, key=lambda name: steps()[name].rank))
            reason = f"{after.name} stands before {before.name}, since {after.reason}"
            raise RecipeError(f"method {text!r}: {reason}; write {right}+{GPTQ.name}")
    return Chain(steps=chain)
