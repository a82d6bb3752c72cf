"""Chains: steps that rotate a model, rescale channels or move what is rounded, and the method that rounds it.

Spelled ``STEP+...+METHOD``, such as ``awq+mse_weighted``, ``shift+gptq`` or ``rotate+awq+shift+descent``.
Each step says where in a chain it stands, and why.
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
from .mse import METHOD as MSE
from .mse_weighted import METHOD as MSE_WEIGHTED
from .nearest import METHOD as NEAREST
from .registry import OF_MODELS, methods, steps
from .rescaling import Rescaling
from .rotate import ModelRotation, needs_checkpoint, rotation_named
from .step import ChainPart, Step

_TARGET_BYTES = 24
"""Memory of a value of the target, of its change, and of a product on the way, in float64."""
ENDS = {end.name: end for end in (GPTQ, DESCENT, ADAROUND)}
"""Methods that round a target of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChain:
    """A rotation, steps that rescale channels, steps that move the target, and the method that rounds it.

    The first two change layers on both sides, which a checkpoint and the driver of a model do; here they are
    only named.
    """

    rotation: ModelRotation | None = None
    rescalings: tuple[Rescaling, ...] = ()
    steps: tuple[Step, ...] = ()
    end: Method

    @property
    def _parts(self) -> tuple[ModelRotation | Rescaling | Step | Method, ...]:
        first = () if self.rotation is None else (self.rotation,)
        return (*first, *self.rescalings, *self.steps, self.end)

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
    def unrotated(self) -> Method:
        """Return what is left once the model is rotated."""
        return replace(self, rotation=None) if self.rescalings or self.steps else self.end

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

        Raises CalibrationError for steps that rescale channels, which are of a model, UnsupportedError for a
        rotation, which is of a checkpoint.
        """
        if self.rotation is not None:
            raise UnsupportedError(needs_checkpoint(self))
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
    alone, found = _step_named(text), [_step_named(name) for name in names]
    if alone is not None:
        raise RecipeError(
            f"{text!r} is a step, and a method has to follow it; write {text}+{_follows(alone)}"
        )
    parts = [part for part in found if part is not None]
    if not names or len(parts) < len(names):
        return None
    moves = [part for part in parts if not isinstance(part, ModelRotation) and not _rescales(part)]
    end = ENDS.get(last) if moves else methods().get(last)
    if end is None or last.startswith(OF_MODELS):
        ends = " or ".join(ENDS) if moves else f"{DEFAULT_END}, {GPTQ.name} or another method of checkpoints"
        raise RecipeError(
            f"method {text!r} ends with {last!r}, and these steps end with {ends}: {'+'.join(names)}+gptq"
        )
    for before, after in itertools.pairwise(parts):
        if before.rank == after.rank and before != after:
            raise RecipeError(f"method {text!r}: {before.name} and {after.name} do the same; leave one out")
        if before.rank >= after.rank:
            right = "+".join(part.name for part in sorted({*parts}, key=lambda part: part.rank))
            reason = f"{after.name} stands before {before.name}, since {after.reason}"
            reason = f"{after.name} stands there twice" if before == after else reason
            raise RecipeError(f"method {text!r}: {reason}; write {right}+{last}")
    return MethodChain(
        rotation=next((part for part in parts if isinstance(part, ModelRotation)), None),
        rescalings=tuple(cast(Rescaling, part) for part in parts if _rescales(part)),
        steps=tuple(cast(Step, part) for part in moves), end=end,
    )  # fmt: skip


DEFAULT_END = "mse_weighted"
"""What follows steps that rescale channels, in messages."""


def _step_named(text: str) -> ModelRotation | Rescaling | Step | None:
    """Return the step that ``text`` spells, or None for other texts."""
    return steps().get(text) or rotation_named(text)


def _rescales(part: ChainPart) -> bool:
    return hasattr(part, "candidates")


def _follows(part: ChainPart) -> str:
    """Return a method that may follow a step, for messages."""
    if isinstance(part, ModelRotation):
        return MSE.name
    return DEFAULT_END if _rescales(part) else GPTQ.name


def without_rescalings(method: Method) -> Method:
    """Return what a method does once channels are rescaled."""
    return replace(method, rescalings=()) if isinstance(method, MethodChain) else method


def rounding_of(method: Method, scheme: Scheme) -> Method:
    """Return the method by which candidates of rescalings are compared: its end, or that of its scales."""
    end = method.end if isinstance(method, MethodChain) else method
    if not isinstance(end, ErrorFeedback):
        return end
    return NEAREST if MSE_WEIGHTED.refusal(scheme) else MSE_WEIGHTED
