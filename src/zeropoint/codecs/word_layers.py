"""Transposed weights in 32-bit words, shared by GPTQ and AWQ.

Scales and zero points are of groups.

    X.qweight   I32: codes of X.weight (N, K)
    X.qzeros    I32 [K / g, ...]: zero points of groups of g inputs
    X.scales    F16 [K / g, N]

This module has what the layouts share, which are codecs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..architectures import Config, model_type
from ..errors import printable
from .compressed_tensors.tested import ASKED, ASKED_LATE, NO_LINEAR, of_gptq
from .engines import Facts, Loads, Problem, always, fused_alike
from .records import Known, model_dtype

CODES, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"


def facts_of(known: Known | None, shape: tuple[int, int], config: Config) -> Known:
    """Return a weight's shape and dtype, float16 unless known."""
    if known is not None and known.shape == shape:
        return known
    return Known(shape, model_dtype(config, torch.float16))


def transformers(facts: Facts) -> Iterator[Problem]:
    """Yield the problems of transformers, which replaces Linear layers by name."""
    if facts.experts:
        yield Loads.NO, "it reads no experts in this layout"
    if facts.cut is not None:
        yield (
            Loads.NO,
            f"it makes other layers of {printable(facts.cut)}, which it does not of packed weights",
        )
    if facts.asked is not None:
        yield Loads.NO, f"its code {ASKED} of {printable(facts.asked)}, where it finds codes alone"
    for mark in (NO_LINEAR, ASKED_LATE):
        other = of_gptq(mark).get(model_type(facts.family))
        if other is not None:
            yield Loads.NO, other


def vllm(facts: Facts) -> Iterator[Problem]:
    """Yield what vLLM says of these layouts."""
    yield from fused_alike(facts)
    if facts.nonlinear:
        yield Loads.NO, "quantized embeddings and routers are not read"


tensorrt = always(Loads.PARTLY, "it reads groups of 4 bits for some models")
