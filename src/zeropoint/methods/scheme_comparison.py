"""Compares schemes on one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import OptionError
from ..functional import row_errors
from ..results import Result
from ..schemes import Scheme
from ..signatures import by_signature
from ..tensor import Deviation, QuantizedTensor
from .of_tensors import quantize


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedScheme:
    """A scheme and its error on a tensor.

    name: as it was given. scheme: in full. bits: of a value, scales and zero points counted. error: of the
    decoded values. clipped: share of values beyond the ends of their block. bound: largest proven bound of
    the error of a value.
    """

    name: str
    scheme: str
    bits: float
    error: Deviation
    clipped: float
    bound: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, below :data:`HEADS`."""
        ratio = "exact" if self.error.relative == 0 else f"{self.error.sqnr_db:.1f}"
        clipped = "0" if self.clipped == 0 else f"{self.clipped:.2%}"
        numbers = (f"{self.bits:.3f}", f"{self.error.relative:.4f}", ratio)
        name = self.name if len(self.name) <= _NAMED else f"{self.name[: _NAMED - 3]}..."
        return (name, *numbers, f"{self.error.largest:.3g}", f"{self.bound:.3g}", clipped)


_NAMED = 40
"""Characters of a name in a table: the values of a codebook stand in it."""
HEADS = ("scheme", "bits", "rel.err", "SQNR dB", "largest", "bound", "clipped")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SchemeComparison(Result):
    """Schemes side by side on one tensor.

    schemes: what was found of each, in the order in which they were given. shape: of the tensor. dtype: of
    the tensor.
    """

    schemes: tuple[ComparedScheme, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        rows = (HEADS, *(each.cells for each in self.schemes))
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        return tuple(
            "  ".join((f"{name:<{first}}", *(f"{cell:>{n}}" for cell, n in zip(cells, others, strict=True))))
            for name, *cells in rows
        )

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "schemes": [_facts(each) for each in self.schemes],
        }


def _facts(each: ComparedScheme) -> dict[str, Any]:
    numbers = {
        "bits": each.bits, "relative": each.error.relative, "sqnr_db": each.error.sqnr_db,
        "largest": each.error.largest, "clipped": each.clipped, "bound": each.bound,
    }  # fmt: skip
    finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return {"name": each.name, "scheme": each.scheme, **finite}


@partial(by_signature, but=("x",))
def compare(
    x: torch.Tensor,
    schemes: Iterable[str | Scheme] | str,
    *,
    method: str | None = None,
    inputs: torch.Tensor | None = None,
) -> SchemeComparison:
    """Return the errors of schemes on a tensor.

    The result prints a table, and :meth:`~SchemeComparison.plot` draws error over bits.

    Checkpoints are compared by :func:`~zeropoint.compare_checkpoints`.

    Args:
        x: float64, float32, float16 or bfloat16; finite; never modified.
        schemes: schemes or presets, such as ``["int4:g128", "mxfp4"]``.
        method: how codes are chosen, as for :func:`~zeropoint.quantize`.
        inputs: what such a method takes, as there.

    Raises:
        OptionError: where no scheme is given.
        ZeropointError: as :func:`~zeropoint.quantize`.

    Example:
        >>> x = torch.linspace(-1, 1, 256).reshape(2, 128)
        >>> compare(x, ["int8:g128", "int4:g128"])
        scheme      bits  rel.err  SQNR dB  largest    bound  clipped
        int8:g128  8.250   0.0068     43.4  0.00392  0.00392        0
        int4:g128  4.250   0.0669     23.5   0.0667   0.0667        0
    """
    given = [schemes] if isinstance(schemes, str | Scheme) else list(schemes)
    if not given:
        raise OptionError("schemes (=[]) must name at least one scheme, such as 'int4:g128'")
    found = tuple(_compared(x, each, quantize(x, each, method=method, inputs=inputs)) for each in given)
    return SchemeComparison(schemes=found, shape=tuple(x.shape), dtype=x.dtype)


def _compared(x: torch.Tensor, given: str | Scheme, q: QuantizedTensor) -> ComparedScheme:
    bounds = q.error_bound(x)
    return ComparedScheme(
        name=str(given),
        scheme=str(q.scheme),
        bits=q.bits_per_value,
        error=q.error(x),
        clipped=int(row_errors(x, q).clipped.sum()) / max(1, x.numel()),
        bound=float(bounds.max()) if bounds.numel() else 0.0,
    )
