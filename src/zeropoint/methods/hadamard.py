r"""Random block Hadamard rotation of weights before quantizing, without data.

    q = quantize(W R)        and       W x = (W R) (R^T x)        with R = D H / sqrt(b) block by block

A rotated weight looks like numbers of a normal distribution, whatever outliers it had: sums of b numbers with
random signs. Codes come from another method on the rotated weight, and errors in W equal errors in W R, since
R is orthogonal. A layer with the codes rotates its inputs (kept), or rotates decoded weights back
(:meth:`~zeropoint.methods.LayerResult.dequantize`).

Spelled ``hadamard<SIZE>@<SEED>+<METHOD>``, each part but the first being optional: ``hadamard``,
``hadamard128``, ``hadamard64@7+mse``. Without a size it is the largest power of two up to `USUAL` that
divides the columns.

Source: Chee et al., QuIP, arXiv:2307.13304 (incoherence), and QuIP#, arXiv:2402.04396 (Hadamard matrices);
Malinovskii et al., HIGGS, arXiv:2411.17525 (without data). Blocks as in MR-GPTQ, arXiv:2509.23202.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..errors import RangeError, RecipeError, SchemeError, ShapeError
from ..method_names import OF_CODES, ROTATING
from ..ops.rotation import Rotation
from ..ops.threads import gradual_underflow
from ..schemes import Granularity, Scheme
from .method import NO_DATA, Bound, LayerData, LayerResult, Method, Scope, require_scheme
from .nearest import METHOD as NEAREST
from .registry import method_named

USUAL = 128
"""Most columns of a block where none is given: MR-GPTQ's and EXL3's."""
_TEXT = re.compile(r"hadamard(?P<size>\d+)?(?:@(?P<seed>\d+))?(?:\+(?P<inner>.+))?", re.DOTALL)
_ROTATED_BYTES = 24
"""Memory of a rotated value and of its transform, in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoherence(Method):
    """Rotate a weight, then quantize it by another method.

    size: columns of a block, a power of two; None for the largest up to `USUAL` that divides the columns.
    seed: of the signs. inner: the method that quantizes what is rotated.
    """

    formula: ClassVar[str] = (
        "q = round(W R / s + z), R orthogonal: Hadamard matrices in blocks, with random signs"
    )
    source: ClassVar[str] = "QuIP# (arXiv:2402.04396); HIGGS (arXiv:2411.17525)"

    size: int | None = None
    seed: int = 0
    inner: Method = NEAREST

    @property
    def name(self) -> str:
        """Return the spelling; ``hadamard`` alone rounds to nearest."""
        size = "" if self.size is None else str(self.size)
        inner = "" if self.inner.name == NEAREST.name else f"+{self.inner.name}"
        return f"hadamard{size}" + (f"@{self.seed}" if self.seed else "") + inner

    def scope(self, scheme: Scheme) -> Scope:
        """Rows; the layer for a tensor-wide scale, from all rotated rows."""
        whole = any(level.granularity == Granularity.tensor() for level in scheme.levels)
        inner = self.inner.scope(scheme)
        return Scope.LAYER if whole else Scope.ROWS if inner is Scope.BLOCKS else inner

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse what the method of rotated weights refuses."""
        return self.inner.refusal(scheme)

    def bound(self, scheme: Scheme) -> Bound:
        """Return the inner method's bound, for rotated weights."""
        return self.inner.bound(scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of rotated values and the inner method."""
        return _ROTATED_BYTES + self.inner.value_bytes(scheme)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return the codes of ``weight`` rotated, and the rotation.

        Raises ShapeError for columns that are no whole blocks, RangeError where sums overflow, NonFiniteError
        for a weight that is not finite, and what the method of rotated weights raises.

        >>> weight = torch.tensor([[0.1, 8.0, -0.1, 0.2]])
        >>> METHOD.quantize(weight, Scheme.parse("int4:channel")).dequantize()
        tensor([[-0.0000, 7.6533, -0.0000, -0.0000]])
        """
        require_scheme(self, scheme)
        if weight.ndim == 0 or weight.numel() == 0:
            return self.inner.quantize(weight, scheme, data)
        rotation = Rotation(size=self._size_for(weight), seed=self.seed)
        with torch.no_grad(), gradual_underflow():
            rotated = rotation.rotate(weight.detach())
        if not bool(torch.isfinite(rotated).all()):
            NEAREST.quantize(weight, scheme)  # raises with the place of a number that is not finite
            raise RangeError(
                f"weight (largest magnitude {float(weight.abs().max()):.4g}) overflows {weight.dtype} when "
                f"method {self.name} rotates it; use method nearest"
            )
        inner = self.inner.quantize(rotated, scheme, replace(data, extremes=None))
        return replace(inner, rotation=rotation)

    def _size_for(self, weight: torch.Tensor) -> int:
        columns = weight.shape[-1]
        if self.size is not None:
            if columns % self.size:
                raise ShapeError(
                    f"size (={self.size}) of method {self.name} must divide the last axis of weight (shape "
                    f"{tuple(weight.shape)}); leave it out, or use method nearest"
                )
            return self.size
        found = min(columns & -columns, USUAL)
        if found == 1 and columns > 1:
            raise ShapeError(
                f"the last axis of weight (shape {tuple(weight.shape)}) must be even for method {self.name}; "
                "use method nearest"
            )
        return found


METHOD = Incoherence()


def spelled(text: str) -> Method | None:
    """Return the method of a text with size, seed or inner method.

    None for other texts. Raises RecipeError for such a text with invalid parts.

    >>> spelled("hadamard64@7+mse").name
    'hadamard64@7+mse'
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    size, seed = (None if found[part] is None else int(found[part]) for part in ("size", "seed"))
    try:
        Rotation(size=1 if size is None else size, seed=seed or 0)
    except SchemeError as error:
        raise RecipeError(f"method {text!r:.60}: {error}") from error
    inner = NEAREST if found["inner"] is None else method_named(found["inner"])
    if inner.name.startswith(ROTATING) or inner.name in OF_CODES or inner.needs:
        why = (
            "needs statistics of inputs, which are not those of rotated ones"
            if inner.needs
            else "does not take rotated weights"
        )
        raise RecipeError(f"method {text!r:.60}: {inner.name} {why}; use hadamard+mse")
    return Incoherence(size=size, seed=seed or 0, inner=inner)
