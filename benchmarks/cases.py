"""What is measured: schemes, directions and dtypes, and how each case is run and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import zeropoint as zp
from zeropoint.schemes.presets import PRESETS as NAMED

QUANTIZE, DEQUANTIZE, FAKE = "quantize", "dequantize", "fake_quantize fwd+bwd"

SCHEMES = ("int8:channel", "int4:g128", "float8_e4m3fn:channel", "mxfp4_e2m1", "mxfp8_e4m3", "nvfp4", "nf4")
PRESETS = ("w8a8", "w4a16", "fp8_dynamic", "mxfp4", "mxfp8", "nvfp4a16")
"""Deployment presets: the rules, and the bytes, of compressed-tensors."""
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
        """The operation, the scheme and the dtype of the values, in or out."""
        dtype = str(self.dtype).removeprefix("torch.")
        name = self.scheme
        if self.rival is not None:
            name = f"{name} (ggml {self.rival})" if self.rival in GGML_BLOCKS else f"preset {self.rival}"
        return f"{self.operation} {name} {'to' if self.operation == DEQUANTIZE else 'from'} {dtype}"


def zeropoint_cases() -> list[Case]:
    """Return the cases of our own schemes, both dtypes, both directions."""
    both = (torch.float32, torch.bfloat16)
    cases = [Case(operation=QUANTIZE, scheme=s, dtype=dtype) for s in SCHEMES for dtype in both]
    cases += [Case(operation=DEQUANTIZE, scheme=s, dtype=dtype) for s in SCHEMES for dtype in both]
    fakes = ("int8:channel", "int8:channel:dialect=torch")
    return cases + [Case(operation=FAKE, scheme=s, dtype=torch.float32) for s in fakes]


def preset_cases() -> list[Case]:
    """Return the deployment presets on bfloat16 weights."""
    return [
        Case(operation=operation, scheme=NAMED[name].weight, dtype=torch.bfloat16, rival=name)
        for operation in (QUANTIZE, DEQUANTIZE)
        for name in PRESETS
    ]


def block_cases() -> list[Case]:
    """Return the blocks of 32 that ggml has as well; ggml works on float32."""
    return [
        Case(operation=operation, scheme=scheme, dtype=torch.float32, rival=name)
        for operation in (QUANTIZE, DEQUANTIZE)
        for name, scheme in GGML_BLOCKS.items()
    ]


def weights(rows: int, cols: int) -> torch.Tensor:
    """Return a float32 matrix like a real weight: rows of different spread, a few large columns.

    The largest magnitude is in the first row, so that the first rows alone give the same scale of the tensor.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator) * 0.02
    x *= torch.exp(0.5 * torch.randn(rows, 1, generator=generator))
    x[:, torch.randint(0, cols, (8,), generator=generator)] *= 6
    x[0, 0] = 2 * x.abs().max()
    return x


@dataclass(frozen=True, kw_only=True)
class Job:
    """A case on real data.

    run: the call to time, into new memory. again: the same into memory that is already there, where there is
    such a call. nbytes: bytes it must read and write, scales counted.
    """

    case: Case
    run: Callable[[], object]
    again: Callable[[], object]
    nbytes: int
    x: torch.Tensor


def job(case: Case, x: torch.Tensor) -> Job:
    """Prepare ``case`` on ``x`` (float32 or bfloat16)."""
    q = zp.quantize(x, case.scheme)
    nbytes = x.nbytes + q.nbytes
    if case.operation == QUANTIZE:
        run, again = lambda: zp.quantize(x, case.scheme), lambda: zp.quantize(x, case.scheme, out=q)
        return Job(case=case, run=run, again=again, nbytes=nbytes, x=x)
    if case.operation == DEQUANTIZE:
        y = q.dequantize()
        return Job(case=case, run=q.dequantize, again=lambda: zp.dequantize(q, out=y), nbytes=nbytes, x=x)
    leaf, slope = x.clone().requires_grad_(), torch.ones_like(x)
    # Forward reads x and writes y; backward reads the slope and x and writes the gradient; both read scales.
    scales = 2 * sum(scale.nbytes for scale in q.scales)
    both = lambda: fake_and_back(leaf, q.params, slope)
    return Job(case=case, run=both, again=both, nbytes=5 * x.nbytes + scales, x=x)


def fake_and_back(
    leaf: torch.Tensor, params: zp.QuantizationParams, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the forward value of fake_quantize and its gradient for ``slope``."""
    leaf.grad = None
    y = zp.fake_quantize(leaf, params)
    y.backward(slope)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def disagreements(job: Job, rows: int) -> list[str]:
    """Return what differs from the reference on the first rows, and what the cpu backend would not run."""
    case, part = job.case, job.x[:rows]
    whole, found = zp.quantize(job.x, case.scheme), []
    with zp.only_backend("reference"):
        expected = zp.quantize(part, case.scheme)
        values = expected.dequantize()
    for name, ours, theirs in _pairs(whole, expected):
        if not same_bytes(ours[: len(theirs)], theirs):
            found.append(f"{case.label}: {name} differ from the reference")
    if case.operation == DEQUANTIZE and not same_bytes(whole.dequantize()[:rows], values):
        found.append(f"{case.label}: values differ from the reference")
    if case.operation == FAKE:
        found += _fake_disagreements(case, part, expected)
    steps = {QUANTIZE: ["quantize_dynamic"], DEQUANTIZE: ["dequantize"]}
    for step in steps.get(case.operation, ["fake_quantize", "fake_quantize_backward"]):
        chosen = zp.explain(job.x, case.scheme, step)
        if chosen.chosen != "cpu":
            found.append(f"{case.label}: {chosen}")
    return found


def _pairs(
    whole: zp.QuantizedTensor, part: zp.QuantizedTensor
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    scales = zip(whole.scales, part.scales, strict=True)
    return [("codes", whole.data, part.data), *(("scales", ours, theirs) for ours, theirs in scales)]


def _fake_disagreements(case: Case, part: torch.Tensor, expected: zp.QuantizedTensor) -> list[str]:
    # Scales a little too small, so that some values are clipped and the gradient has zeros to get right.
    params = zp.choose_params(part * 0.9, case.scheme)
    leaf, slope = part.clone().requires_grad_(), part.clone()
    ours = fake_and_back(leaf, params, slope)
    with zp.only_backend("reference"):
        theirs = fake_and_back(leaf, params, slope)
        twice = zp.quantize(part, params).dequantize()
    assert expected.shape == twice.shape
    names = ("forward", "gradient")
    found = [n for n, a, b in zip(names, ours, theirs, strict=True) if not same_bytes(a, b)]
    if not same_bytes(ours[0], twice):
        found.append("forward and dequantize(quantize)")
    return [f"{case.label}: {name} differ from the reference" for name in found]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes."""
    if a.shape != b.shape or a.element_size() != b.element_size():
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
