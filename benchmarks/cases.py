"""What is measured: schemes, directions and dtypes, and how each case is run and checked."""

from __future__ import annotations

import torch

import zeropoint as zp
from zeropoint.bench.cases import (
    DEQUANTIZE as DEQUANTIZE,
)
from zeropoint.bench.cases import (
    FAKE as FAKE,
)
from zeropoint.bench.cases import (
    GGML_BLOCKS as GGML_BLOCKS,
)
from zeropoint.bench.cases import (
    QUANTIZE as QUANTIZE,
)
from zeropoint.bench.cases import (
    SCHEMES as SCHEMES,
)
from zeropoint.bench.cases import (
    Case as Case,
)
from zeropoint.bench.cases import (
    TimedCase as TimedCase,
)
from zeropoint.bench.cases import (
    fake_and_back as fake_and_back,
)
from zeropoint.bench.cases import (
    job as job,
)
from zeropoint.bench.cases import (
    operator_cases as operator_cases,
)
from zeropoint.bench.cases import (
    weights as weights,
)
from zeropoint.schemes.presets import PRESETS as NAMED

PRESETS = ("w8a8", "w4a16", "fp8_dynamic", "mxfp4", "mxfp8", "nvfp4a16")
"""Deployment presets: the rules, and the bytes, of compressed-tensors."""


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


def disagreements(job: TimedCase, rows: int) -> list[str]:
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
