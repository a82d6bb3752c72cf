"""Ahead-of-time compilation of kernels, by calls on few numbers.

Kernels take formats and schemes as numbers, so that few calls compile them all: one for each way through the
operators and each dtype. What a call compiles stays on disk for all later processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from .functional import fake_quantize, quantize, row_errors
from .methods import LayerData, method_named
from .models import calibrate, quantize_model
from .ops import feedback
from .recipes import model_preset
from .schemes import PRESETS, Scheme

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEMES = (
    "int8:channel", "int4:g128", "int4:g128:scale=input:dialect=compressed-tensors", "int4:g128:asym",
    "uint8:tensor:asym", "int8:channel:asym=real", "float8_e4m3fn:channel", "e3m2:g32:scale=float16",
    "mxfp4:scale=even", "mxfp8_e4m3", "nvfp4", "nf4:g64", "float8_e4m3fn:block128x128", "q4_k",
    "uint8:channel1:asym", "tq1_0", "table4:channel", "mx9",
)  # fmt: skip
"""A scheme for each kind of elements, scales and zero points, and of blocks."""
SEARCHED = ("int4:g128", "int8:channel", "int4:g128:asym", "nvfp4a16", "nf4:g64", "table4:channel")
"""A scheme for each search of parameters of least squared error."""
_ROWS, _COLUMNS = 64, 256


def compile_kernels(on_progress: Callable[[int, int, str], None] | None = None) -> int:
    """Compile the kernels of all operators; return the calls made.

    on_progress: called with (calls done, calls in all, what was called last).
    """
    calls = [*_operators(), *_searches(), *_layers(), *_products()]
    for done, (name, call) in enumerate(calls, 1):
        call()
        if on_progress is not None:
            on_progress(done, len(calls), name)
    return len(calls)


def _operators() -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in DTYPES:
        for text in SCHEMES:
            yield f"{text} {dtype}", partial(_operate, Scheme.parse(text), dtype)


def _operate(scheme: Scheme, dtype: torch.dtype) -> None:
    x = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = quantize(x, scheme)
    for wide in DTYPES:
        q.dequantize(wide)
    given = quantize(x, q.params)
    row_errors(x, given)
    trained = x.clone().requires_grad_()
    fake_quantize(trained, q.params).sum().backward()  # type: ignore[no-untyped-call]
    fake_quantize(x, scheme)


def _searches() -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in DTYPES:
        for text in SEARCHED:
            yield f"search of {text} {dtype}", partial(_search, Scheme.parse(text), dtype)


def _search(scheme: Scheme, dtype: torch.dtype) -> None:
    x = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)
    method_named("mse").quantize(x, scheme, LayerData())


def _layers() -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in DTYPES:
        for preset in PRESETS:
            yield f"linear {preset} {dtype}", partial(_multiply, preset, dtype)


def _multiply(preset: str, dtype: torch.dtype) -> None:
    model = nn.Linear(_COLUMNS, _ROWS).to(dtype)
    inputs = [torch.randn(tokens, _COLUMNS).to(dtype) for tokens in (1, 8, 64)]
    with torch.no_grad():
        known = calibrate(model, preset, inputs) if model_preset(preset).needs_calibration else None
        layer = quantize_model(model, preset, calibration=known).model
        for x in inputs:
            layer(x)


def _products() -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in DTYPES:
        yield f"sums of products {dtype}", partial(_sum_up, dtype)
    yield "error feedback", _feed_back


def _sum_up(dtype: torch.dtype) -> None:
    x = torch.ones(_ROWS, _COLUMNS).to(dtype)
    feedback.gram(x)
    feedback.squares(x)


def _feed_back() -> None:
    h, weight = torch.eye(_COLUMNS, dtype=torch.float64), torch.ones(_ROWS, _COLUMNS)
    block_of = torch.zeros(_COLUMNS, dtype=torch.int64)
    levels = torch.arange(-8, 8, dtype=torch.float64)
    grid = feedback.Grid(levels=levels, scale=torch.ones(_ROWS, 1), block_of=block_of)
    m, d = feedback.factor(h)
    values, _ = feedback.feed_back(weight, m, d, None, grid)
    feedback.descend(weight, values, h, None, grid, sweeps=1)
