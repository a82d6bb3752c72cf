"""Channel folds: the changes of model parameters by rescaling and corrections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..errors import option
from ..schemes import Scheme
from .method import GRAM, Method, Scope

if TYPE_CHECKING:  # it loads statistics
    from .rescaling import Rescaling
    from .step import Correction

PARTS = 8
"""Steps of a power of two."""


def numbers_of(steps: torch.Tensor) -> torch.Tensor:
    """Return ``2^(k / 8)`` for each ``k``, float64.

    >>> numbers_of(torch.tensor([-8, 0, 16]))
    tensor([0.5000, 1.0000, 4.0000], dtype=torch.float64)
    """
    found = {k: 2.0 ** (k / PARTS) for k in set(steps.tolist())}
    return torch.tensor([found[k] for k in steps.tolist()], dtype=torch.float64, device=steps.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFold:
    """Factors of a parameter's rows and columns, and its summand.

        W' = diag(rows) (W + one) diag(columns) - one + added

    Args:
        rows: a number for each row, as int64 steps of :func:`numbers_of`, or None for ones.
        columns: likewise for each column.
        one: the module's own summand to its weight.
        added: a number for each row, float32, or None for zeros.
    """

    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    one: float = 0.0
    added: torch.Tensor | None = None

    @property
    def rescaling(self) -> ChannelFold:
        """The same fold without summand, which keeps the model's function."""
        return replace(self, added=None)

    def on(self, device: torch.device) -> ChannelFold:
        """Return the fold with its tensors on a device."""
        rows, columns, added = (
            None if x is None else x.to(device) for x in (self.rows, self.columns, self.added)
        )
        return replace(self, rows=rows, columns=columns, added=added)

    def of(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return rows of ``x`` from ``first`` folded, rounded once to the dtype."""
        y = x.double() + self.one
        if self.rows is not None:
            y = y * numbers_of(self.rows[first : first + len(x)]).reshape(-1, *[1] * (x.ndim - 1))
        if self.columns is not None:
            y = y * numbers_of(self.columns)
        y = y - self.one
        if self.added is not None:
            y = y + self.added[first : first + len(x)].double().reshape(-1, *[1] * (x.ndim - 1))
        return y.to(x.dtype)

    def then(self, other: ChannelFold) -> ChannelFold:
        """Return the composition; the first fold has no summand."""
        assert self.added is None
        return ChannelFold(
            rows=_both(self.rows, other.rows),
            columns=_both(self.columns, other.columns),
            one=max(self.one, other.one),
            added=other.added,
        )


def _both(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def needs_model(method: Method, scheme: Scheme) -> str | None:
    """Return the reason why a method needs a whole model, or None."""
    if corrections_of(method):
        parameter = corrections_of(method)[0].parameter
        does = f"corrects a {parameter} by the inputs of the float and of the quantized model"
    elif rescalings_of(method):
        does = "rescales channels together with the layers on their other side"
    elif method.scope(scheme) is Scope.BLOCK:
        does = "rounds the weights of a block of a model together"
    else:
        return None
    return (
        f"method {method.name} {does}, for which the model runs on data; pass "
        f"{option('calibration', metavar='DATA')}"
    )


def rescalings_of(method: Method) -> tuple[Rescaling, ...]:
    """Return the steps of a method that rescale channels."""
    found: tuple[Rescaling, ...] = getattr(method, "rescalings", ())
    return found


def corrections_of(method: Method) -> tuple[Correction, ...]:
    """Return the parts of a method that correct other parameters."""
    found: tuple[Correction, ...] = getattr(method, "corrections", ())
    return found


def kept_with_codes(method: Method) -> str | None:
    """Return the name of a step's tensors kept next to codes."""
    steps: tuple[object, ...] = getattr(method, "steps", ())
    return next((kept for step in steps if (kept := getattr(step, "keeps", None)) is not None), None)


def in_order(method: Method) -> bool:
    """Return whether layers are solved in the order in which they run."""
    return bool(rescalings_of(method) or corrections_of(method)) or GRAM in method.takes
