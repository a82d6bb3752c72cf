"""Chains: steps that rescale channels or move the target of a weight, and the method that rounds it.

Spelled ``STEP+...+METHOD``, such as ``awq+mse_weighted``, ``shift+gptq`` or ``awq+shift+descent``. Each step
says where in a chain it stands, and why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch

from ..errors import CalibrationError, RecipeError, UnsupportedError
from ..schemes import Scheme
from ..stats import Accumulator
from .adaround import METHOD as ADAROUND
from .channels import needs_model
from .descent import METHOD as DESCENT
from .gptq import METHOD as GPTQ
from .gptq import ErrorFeedback
from .method import NO_DATA, Bound, LayerData, LayerResult, Method, Scope
from .mse_weighted import METHOD as MSE_WEIGHTED
from .nearest import METHOD as NEAREST
from .registry import OF_MODELS, methods, steps
from .rescaling import Rescaling
from .signround import METHOD as SIGNROUND
from .signround import BlockRounding
from .step import Step

_TARGET_BYTES = 24
"""Memory of a value of the target, of its change, and of a product on the way, in float64."""
ENDS: dict[str, Method] = {end.name: end for end in (GPTQ, DESCENT, ADAROUND, SIGNROUND)}
"""Methods that round a target of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChain:
    """Steps that rescale channels, steps that move the target, and the method that rounds it.

    The first ones change layers on both sides, which the driver of a model does; here they are only named.
    """

    rescalings: tuple[Rescaling, ...] = ()
    steps: tuple[Step, ...] = ()
    end: Method

    @property
    def _parts(self) -> tuple[Rescaling | Step | Method, ...]:
        return (*self.rescalings, *self.steps, self.end)

    @property
    def name(self) -> str:
        """Return the spelling."""
        return "+".join(part.name for part in self._parts)

    @property
    def formula(self) -> str:
        """Return the formulas, in order."""
        return "; then ".join(part.formula for part in self._parts)

    @property
    def source(self) -> str:
        """Return the sources, in order."""
        return "; ".join(part.source for part in self._parts)

    @property
    def needs(self) -> Mapping[str, Callable[[int], Accumulator]]:
        """Return what its steps and its end need."""
        found = [*(step.takes for step in self.steps), self.end.needs]
        return {need: make for takes in found for need, make in takes.items()}

    @property
    def takes(self) -> Mapping[str, Callable[[int], Accumulator]]:
        """Return what it needs, and what its end can use."""
        return {**self.end.takes, **self.needs}

    def scope(self, scheme: Scheme) -> Scope:
        """See its end."""
        return self.end.scope(scheme)

    def refusal(self, scheme: Scheme) -> str | None:
        """See its end."""
        return self.end.refusal(scheme)

    def bound(self, scheme: Scheme) -> Bound:
        """Return that of its end, or none where that is of a target, which no file holds."""
        return Bound.NONE if self.steps else self.end.bound(scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of a value: that of the end, and of targets."""
        return self.end.value_bytes(scheme) + (_TARGET_BYTES if self.steps else 0)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return codes of ``weight`` that come close to its target; raises what steps and the end raise.

        Raises CalibrationError for steps that rescale channels, which are of a model.
        """
        if self.rescalings:
            raise CalibrationError(needs_model(self))
        refusal = self.refusal(scheme)
        if refusal is not None:
            raise UnsupportedError(refusal)
        if weight.numel() == 0 or not isinstance(self.end, ErrorFeedback):
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
    every = steps()
    if text in every:
        follows = DEFAULT_END if _rescales(text) else GPTQ.name
        raise RecipeError(f"{text!r} is a step, and a method has to follow it; write {text}+{follows}")
    if not names or any(name not in every for name in names):
        return None
    moves = [name for name in names if not _rescales(name)]
    end = ENDS.get(last) if moves else methods().get(last)
    if end is None or last.startswith(OF_MODELS):
        ends = " or ".join(ENDS) if moves else f"{DEFAULT_END}, {GPTQ.name} or another method of checkpoints"
        raise RecipeError(
            f"method {text!r} ends with {last!r}, and these steps end with {ends}: {'+'.join(names)}+gptq"
        )
    for before, after in itertools.pairwise(every[name] for name in names):
        if before.rank == after.rank and before != after:
            raise RecipeError(f"method {text!r}: {before.name} and {after.name} do the same; leave one out")
        if before.rank >= after.rank:
            right = "+".join(sorted({*names}, key=lambda name: every[name].rank))
            reason = f"{after.name} stands before {before.name}, since {after.reason}"
            reason = f"{after.name} stands there twice" if before == after else reason
            raise RecipeError(f"method {text!r}: {reason}; write {right}+{last}")
    rescalings = tuple(cast(Rescaling, every[name]) for name in names if _rescales(name))
    return MethodChain(rescalings=rescalings, steps=tuple(cast(Step, every[name]) for name in moves), end=end)


DEFAULT_END = "mse_weighted"
"""What follows steps that rescale channels, in messages."""


def _rescales(name: str) -> bool:
    return hasattr(steps()[name], "candidates")


def without_rescalings(method: Method) -> Method:
    """Return what a method does once channels are rescaled."""
    return replace(method, rescalings=()) if isinstance(method, MethodChain) else method


def start_of(method: Method) -> Method:
    """Return the method whose codes weights have before they are rounded together, or the method itself."""
    if isinstance(method, MethodChain):
        return replace(method, end=start_of(method.end))
    return method.start if isinstance(method, BlockRounding) else method


def rounding_of(method: Method, scheme: Scheme) -> Method:
    """Return the method by which candidates of rescalings are compared: its end, or that of its scales."""
    end = start_of(method.end if isinstance(method, MethodChain) else method)
    if not isinstance(end, ErrorFeedback):
        return end
    return NEAREST if MSE_WEIGHTED.refusal(scheme) else MSE_WEIGHTED
