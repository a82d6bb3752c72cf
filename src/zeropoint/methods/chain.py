"""Method chains: rotation, rescaling, target steps, a method, and corrections.

Spelled ``STEP+...+METHOD``, such as ``awq+mse_weighted``, ``shift+gptq`` or ``rotate+awq+shift+descent``, and
``gptq+bias`` with a correction. Each step says where in a chain it stands, and why.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from ..errors import CalibrationError, RecipeError, UnsupportedError
from ..method_names import OF_MODELS
from ..schemes import Scheme
from .adaround import METHOD as ADAROUND
from .channels import needs_model
from .descent import METHOD as DESCENT
from .gptq import METHOD as GPTQ
from .gptq import ErrorFeedback
from .method import NO_DATA, Bound, LayerData, LayerResult, Method, Needs, Scope, require_scheme
from .mse import METHOD as MSE
from .mse_weighted import METHOD as MSE_WEIGHTED
from .nearest import METHOD as NEAREST
from .registry import plain_method, step_named
from .rescaling import Rescaling
from .rotate import ModelRotation, needs_checkpoint
from .signround import METHOD as SIGNROUND
from .signround import BlockRounding
from .step import Correction, Step

_TARGET_BYTES = 24
"""Memory of a value of the target, of its change, and of a product on the way, in float64."""
ENDS: dict[str, Method] = {end.name: end for end in (GPTQ, DESCENT, ADAROUND, SIGNROUND)}
"""Methods that round a target of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChain(Method):
    """A rotation, rescalings, target steps, a rounding method, and corrections.

    The first two change layers on both sides, which a checkpoint and the driver of a model do; here they are
    only named.
    """

    rotation: ModelRotation | None = None
    rescalings: tuple[Rescaling, ...] = ()
    steps: tuple[Step, ...] = ()
    end: Method
    corrections: tuple[Correction, ...] = ()

    @property
    def _parts(self) -> tuple[ModelRotation | Rescaling | Step | Method | Correction, ...]:
        first = () if self.rotation is None else (self.rotation,)
        return (*first, *self.rescalings, *self.steps, self.end, *self.corrections)

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
        """Return the rest of the chain for a rotated model."""
        kept = self.rescalings or self.steps or self.corrections
        return replace(self, rotation=None) if kept else self.end

    @property
    def needs(self) -> Needs:
        """Return the statistics that its parts need."""
        of_steps, of_corrections = (
            [part.takes for part in parts] for parts in (self.steps, self.corrections)
        )
        found = [*of_steps, *of_corrections, self.end.needs]
        return {need: make for takes in found for need, make in takes.items()}

    @property
    def takes(self) -> Needs:
        """Return the statistics that it needs, or that its end can use."""
        return {**self.end.takes, **self.needs}

    def scope(self, scheme: Scheme) -> Scope:
        """See its end."""
        return self.end.scope(scheme)

    def refusal(self, scheme: Scheme) -> str | None:
        """See its end."""
        return self.end.refusal(scheme)

    def bound(self, scheme: Scheme) -> Bound:
        """Return its end's bound, or none for targets, which files lack."""
        return Bound.NONE if self.steps else self.end.bound(scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of a value: the end's, and the target's."""
        return self.end.value_bytes(scheme) + (_TARGET_BYTES if self.steps or self.corrections else 0)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return codes of ``weight`` close to the chain's target.

        Raises the errors of its steps and end, CalibrationError for steps that rescale channels, which need a
        model, and UnsupportedError for a rotation, which needs a checkpoint.
        """
        if self.rotation is not None:
            raise UnsupportedError(needs_checkpoint(self))
        if self.rescalings:
            raise CalibrationError(needs_model(self, scheme))
        require_scheme(self, scheme)
        result = self._rounded(weight, scheme, data)
        for part in self.corrections if weight.numel() else ():
            found = part.corrected(weight, result.dequantize(torch.float32), data)
            changes = {**result.changes, part.parameter: found.added}
            notes = (*result.notes, f"{part.name} {found.note}".strip())
            result = replace(result, changes=changes, notes=notes)
        return result

    def _rounded(self, weight: torch.Tensor, scheme: Scheme, data: LayerData) -> LayerResult:
        if weight.numel() == 0 or not isinstance(self.end, ErrorFeedback):
            return self.end.quantize(weight, scheme, data)
        target, notes, low_rank = weight.double(), list[str](), None
        for step in self.steps:
            moved = step(weight, target, data, scheme)
            target, notes = moved.target, [*notes, f"{step.name} {moved.note}".strip()]
            low_rank = moved.low_rank or low_rank
        return replace(self.end.solve(weight, target, scheme, data, notes=tuple(notes)), low_rank=low_rank)


def spelled(text: str) -> MethodChain | None:
    """Return the chain that ``text`` spells, or None for other texts.

    Raises RecipeError for a chain in another order, with a step twice, and with another end.

    >>> spelled("shift+gptq+bias").name
    'shift+gptq+bias'
    """
    before, behind = _sides(text.split("+"))
    if not before:
        rounded = [f"{end.name}+{text}" for end in (GPTQ, NEAREST)]
        raise RecipeError(f"{text!r} follows a method; write {' or '.join(rounded)}")
    *names, last = before
    if all(step_named(name) is not None for name in before):
        moved = any(not _rescales(name) and not _rotates(name) for name in before)
        follows = GPTQ.name if moved else DEFAULT_END if any(map(_rescales, before)) else MSE.name
        right = "+".join((*before, follows, *behind))
        raise RecipeError(f"{text!r} names no method, which rounds weights after its steps; write {right}")
    if not (names or behind) or any(step_named(name) is None for name in names):
        return None
    early = next((name for name in names if _corrects(name)), None)
    if early is not None:
        right = "+".join((*(name for name in names if name != early), last, *behind, early))
        raise RecipeError(
            f"method {text!r}: {early} stands last, since {_known(early).reason}; write {right}"
        )
    if len(behind) > len(set(behind)):
        right = "+".join((*before, *dict.fromkeys(behind)))
        raise RecipeError(f"method {text!r}: {behind[0]} stands there twice; write {right}")
    moves = [name for name in names if not _rescales(name) and not _rotates(name)]
    end = ENDS.get(last) if moves else plain_method(last)
    if end is None or last.startswith(OF_MODELS):
        ends = " or ".join(ENDS) if moves else f"{DEFAULT_END}, {GPTQ.name} or another method of checkpoints"
        raise RecipeError(
            f"method {text!r} rounds by {last!r}, and these steps end with {ends}: "
            f"{'+'.join((*names, GPTQ.name, *behind))}"
        )
    keeper = next((name for name in moves if getattr(_known(name), "keeps", None) is not None), None)
    if keeper is not None and isinstance(end, BlockRounding):
        right = "+".join((*names, GPTQ.name, *behind))
        raise RecipeError(
            f"method {text!r}: {last} rounds whole weights once more, of which {keeper} takes a part away; "
            f"write {right}"
        )
    for one, after in itertools.pairwise(map(_known, names)):
        if one.rank == after.rank and one != after:
            raise RecipeError(f"method {text!r}: {one.name} and {after.name} do the same; leave one out")
        if one.rank >= after.rank:
            right = "+".join((*sorted({*names}, key=lambda name: _known(name).rank), last, *behind))
            reason = f"{after.name} stands before {one.name}, since {after.reason}"
            reason = f"{after.name} stands there twice" if one == after else reason
            raise RecipeError(f"method {text!r}: {reason}; write {right}")
    parts = [_known(name) for name in names]
    return MethodChain(
        rotation=next((part for part in parts if isinstance(part, ModelRotation)), None),
        rescalings=tuple(cast(Rescaling, part) for part in parts if _rescales(part.name)),
        steps=tuple(cast(Step, _known(name)) for name in moves),
        end=end,
        corrections=tuple(cast(Correction, _known(name)) for name in behind),
    )


DEFAULT_END = "mse_weighted"
"""What follows steps that rescale channels, in messages."""


def _known(name: str) -> Step | Rescaling | Correction | ModelRotation:
    found = step_named(name)
    assert found is not None
    return found


def _rescales(name: str) -> bool:
    return hasattr(_known(name), "candidates")


def has_own_target(method: Method) -> bool:
    """Return whether a method rounds a target of steps, not the weight."""
    return isinstance(method, MethodChain) and bool(method.steps)


def _rotates(name: str) -> bool:
    return isinstance(_known(name), ModelRotation)


def _corrects(name: str) -> bool:
    return hasattr(_known(name), "corrected")


def _sides(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names up to the method, and the trailing corrections."""
    behind = tuple(reversed([*itertools.takewhile(_is_correction, reversed(names))]))
    return tuple(names[: len(names) - len(behind)]), behind


def _is_correction(name: str) -> bool:
    return step_named(name) is not None and _corrects(name)


def without_corrections(method: Method) -> Method:
    """Return the method without corrections."""
    return replace(method, corrections=()) if isinstance(method, MethodChain) else method


def without_rescalings(method: Method) -> Method:
    """Return the method without rescalings."""
    return replace(method, rescalings=()) if isinstance(method, MethodChain) else method


def start_of(method: Method) -> Method:
    """Return the method of the starting codes, before joint rounding."""
    if isinstance(method, MethodChain):
        return replace(method, end=start_of(method.end))
    return method.start if isinstance(method, BlockRounding) else method


def rounding_of(method: Method, scheme: Scheme) -> Method:
    """Return the method that compares candidate rescalings: end or scale method."""
    end = start_of(method.end if isinstance(method, MethodChain) else method)
    if not isinstance(end, ErrorFeedback):
        return end
    return NEAREST if MSE_WEIGHTED.refusal(scheme) else MSE_WEIGHTED
