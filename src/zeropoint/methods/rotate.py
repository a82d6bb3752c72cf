"""Rotation of a model's residual stream and head values before quantization.

    W' = A^T W diag(g) B

B rotates what a matrix reads and A what it writes, block Hadamard matrices with random signs both; g is the
weight of the norm before it, which is folded. All matrices of a model are rotated together, so that this is
no step of one layer: :mod:`zeropoint.checkpoint.plan.rotated` makes it one of a checkpoint.

Spelled ``rotate<BLOCK>@<SEED>``, each part but the first being optional: ``rotate+gptq``, ``rotate64@7+mse``.
Without a block it is the largest power of two that divides the stream.

Source: Ashkboos et al., QuaRot, arXiv:2404.00456; Liu et al., SpinQuant, arXiv:2405.16406 (R1 and R2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..errors import RecipeError, SchemeError, option
from ..ops.rotation import Rotation
from .method import Method

_TEXT = re.compile(r"rotate(?P<block>\d+)?(?:@(?P<seed>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRotation:
    """Rotations of a model's residual stream and of its head values.

    seed: of the signs. block: numbers of the stream that are mixed, a power of two that divides it; None for
    the largest.
    """

    rank: ClassVar[int] = 0
    reason: ClassVar[str] = "what later steps and the codes see is the rotated model"
    formula: ClassVar[str] = "A^T W diag(g) B, A and B Hadamard matrices in blocks, with random signs"
    source: ClassVar[str] = "QuaRot (arXiv:2404.00456); SpinQuant (arXiv:2405.16406)"

    seed: int = 0
    block: int | None = None

    @property
    def name(self) -> str:
        """Return the spelling."""
        return f"rotate{'' if self.block is None else self.block}" + (f"@{self.seed}" if self.seed else "")

    @staticmethod
    def spelled(text: str) -> ModelRotation | None:
        """Return the rotation that ``text`` spells, or None for other texts.

        Raises RecipeError for a block or a seed that no rotation has.

        >>> ModelRotation.spelled("rotate64@7").name
        'rotate64@7'
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        block, seed = (None if found[part] is None else int(found[part]) for part in ("block", "seed"))
        try:
            Rotation(size=1 if block is None else block, seed=seed or 0)
        except SchemeError as error:
            raise RecipeError(f"step {text!r:.60}: {error}") from error
        return ModelRotation(block=block, seed=seed or 0)


STEP = ModelRotation()


def rotation_of(method: Method) -> ModelRotation | None:
    """Return the model rotation that a method begins with, or None."""
    found: ModelRotation | None = getattr(method, "rotation", None)
    return found


def unrotated(method: Method) -> Method:
    """Return the rest of a method for a rotated model."""
    found: Method = getattr(method, "unrotated", method)
    return found


def needs_checkpoint(method: Method) -> str:
    """Return why a method with such a step is for checkpoints alone."""
    return (
        f"method {method.name} rotates a model as a whole, which is done in its files; use "
        "zp.quantize_checkpoint, or load what zp.rotate_checkpoint writes and leave the step out"
    )


def of_rotated(rotation: ModelRotation, name: str) -> str:
    """Return the refusal of an option ``name`` with unrotated input statistics."""
    return (
        f"{option(name)} is about inputs of the model as it is, and {rotation.name} rotates it; pass "
        f"{option('calibration', metavar='DATA')} in its place, or leave the step out"
    )
