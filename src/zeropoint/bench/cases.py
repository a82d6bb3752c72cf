"""Benchmark cases: operators on schemes and dtypes, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..functional import dequantize, fake_quantize, quantize
from ..params import QuantizationParams

QUANTIZE, DEQUANTIZE, FAKE = "quantize", "dequantize", "fake_quantize fwd+bwd"

SCHEMES = ("int8:channel", "int4:g128", "float8_e4m3fn:channel", "mxfp4_e2m1", "mxfp8_e4m3", "nvfp4", "nf4")
GGML_BLOCKS = {"Q4_0": "int4:g32", "Q8_0": "int8:g32", "MXFP4": "mxfp4_e2m1"}
"""ggml's formats and what we compare with them: as many bits, blocks of 32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: an operator on a scheme and a dtype.

    rival: the one peer's own name for the work, in cases that were made for a peer.
    """

    operation: str
    scheme: str
    dtype: torch.dtype
    rival: str | None = None

    @property
    def label(self) -> str:
        """Operation, scheme and dtype of the values, in or out."""
        dtype = str(self.dtype).removeprefix("torch.")
        name = self.scheme
        if self.rival is not None:
            name = f"{name} (ggml {self.rival})" if self.rival in GGML_BLOCKS else f"preset {self.rival}"
        return f"{self.operation} {name} {'to' if self.operation == DEQUANTIZE else 'from'} {dtype}"


def operator_cases() -> list[Case]:
    """Return the cases of the operators: each scheme, both dtypes, both directions."""
    both = (torch.float32, torch.bfloat16)
    cases = [Case(operation=QUANTIZE, scheme=s, dtype=dtype) for s in SCHEMES for dtype in both]
    cases += [Case(operation=DEQUANTIZE, scheme=s, dtype=dtype) for s in SCHEMES for dtype in both]
    fakes = ("int8:channel", "int8:channel:dialect=torch")
    return cases + [Case(operation=FAKE, scheme=s, dtype=torch.float32) for s in fakes]


def weights(rows: int, cols: int) -> torch.Tensor:
    """Return a float32 matrix like a real weight.

    Rows have different spreads, and a few columns are large. The largest magnitude is in the first row, so
    that the first rows alone give the same scale of the tensor.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator) * 0.02
    x *= torch.exp(0.5 * torch.randn(rows, 1, generator=generator))
    x[:, torch.randint(0, cols, (8,), generator=generator)] *= 6
    x[0, 0] = 2 * x.abs().max()
    return x


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """A case on real data.

    run: the call to time, into new memory. again: the same into memory that is already there, where there is
    such a call. nbytes: bytes it must read and write, scales counted.
    """

    case: Case
    run: Callable[[], object]
    again: Callable[[], object]
    nbytes: int
    x: torch.Tensor


def job(case: Case, x: torch.Tensor) -> TimedCase:
    """Prepare ``case`` on ``x`` (float32 or bfloat16)."""
    q = quantize(x, case.scheme)
    nbytes = x.nbytes + q.nbytes
    if case.operation == QUANTIZE:
        run, again = lambda: quantize(x, case.scheme), lambda: quantize(x, case.scheme, out=q)
        return TimedCase(case=case, run=run, again=again, nbytes=nbytes, x=x)
    if case.operation == DEQUANTIZE:
        y = q.dequantize()
        return TimedCase(case=case, run=q.dequantize, again=lambda: dequantize(q, out=y), nbytes=nbytes, x=x)
    leaf, slope = x.clone().requires_grad_(), torch.ones_like(x)
    # Forward reads x and writes y; backward reads the slope and x and writes the gradient; both read scales.
    scales = 2 * sum(scale.nbytes for scale in q.scales)
    both = lambda: fake_and_back(leaf, q.params, slope)
    return TimedCase(case=case, run=both, again=both, nbytes=5 * x.nbytes + scales, x=x)


def fake_and_back(
    leaf: torch.Tensor, params: QuantizationParams, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the forward value of fake_quantize and its gradient for ``slope``."""
    y = fake_quantize(leaf, params)
    (gradient,) = torch.autograd.grad(y, leaf, slope)
    return y.detach(), gradient
