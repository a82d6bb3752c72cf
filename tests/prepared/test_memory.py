"""A run with ``out`` takes no memory that grows with the tensor, and the workspace is what is reported.

What is counted: every request to torch's allocator, by the profiler, and the rise of Python's and numpy's
memory, by tracemalloc, in all threads. Neither sees the stacks of threads, where kernels keep their tiles.
"""

from typing import Any

import numpy as np
import pytest
import torch
from tests.prepared.memory import held_bytes, python_bytes, tensor_bytes

import zeropoint as zp
from zeropoint.prepared import Plan, plan

pytestmark = pytest.mark.rotating

OPS = ("quantize", "dequantize", "fake_quantize", "fake_quantize_backward")
SCHEMES = (
    "int8:channel-1", "uint4:g32:asym", "uint4:g32:asym:scale=float16", "float8_e4m3fn:block4x8", "mxfp4",
    "nvfp4", "float4_e2m1fn:block2x16:scale=ue4m3:scale2=float32@tensor",
)  # fmt: skip
SHAPE = (512, 1024)
LEAST_GROWING = SHAPE[0] * SHAPE[1] // 8
"""Bytes of a float32 for each of 32 elements, as the schemes with blocks of at most 32 would take."""
CONSTANT = 12 << 10
"""Bytes of Python's own objects in a call: frames, closures, views; measured at most 7.5 KiB."""
SCALARS = 2 << 10
"""Bytes of tensors of one element: rounding the scale of a whole tensor, above others, takes some 1,000."""
TRANSPOSING = 32 << 10
"""Bytes of the buffer through which torch transposes, for a matrix of any size."""


def inputs_of(op: str, source: str | zp.QuantizationParams, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return what a plan for ``op`` runs on."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    if op == "dequantize":
        return (zp.quantize(x, source),)
    return (x, x.clone()) if op == "fake_quantize_backward" else (x,)


@pytest.mark.crossed
@pytest.mark.parametrize("given", [True, False], ids=["given", "chosen"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_takes_no_memory_and_the_workspace_is_what_the_plan_holds(
    scheme: str, op: str, given: bool
) -> None:
    dtype = torch.bfloat16 if "g32" in scheme else torch.float32
    source: str | zp.QuantizationParams = scheme
    if given:
        source = zp.quantize(inputs_of("quantize", scheme, dtype)[0], scheme).params
    inputs = inputs_of(op, source, dtype)
    # The first plan and its run fill caches that all plans share.
    out = plan(op, source, SHAPE, dtype).run(*inputs)
    made: list[Plan] = []
    held = held_bytes(lambda: made.append(plan(op, source, SHAPE, dtype)))
    (p,) = made
    assert p.allocates is None
    assert abs(held - p.workspace_bytes - p.parameter_bytes) <= CONSTANT
    assert tensor_bytes(lambda: p.run(*inputs, out=out)) <= SCALARS
    assert python_bytes(lambda: p.run(*inputs, out=out)) <= CONSTANT < LEAST_GROWING


@pytest.mark.crossed
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scheme", ["int8:g32", "uint8:channel:asym", "int8:block4x8:asym=real", "int4:g32"])
def test_float64_under_given_parameters_takes_no_memory_either(scheme: str, op: str) -> None:
    dtype = torch.float64
    source = zp.quantize(inputs_of("quantize", scheme, dtype)[0], scheme).params
    inputs = inputs_of(op, source, dtype)
    out = plan(op, source, SHAPE, dtype).run(*inputs)
    made: list[Plan] = []
    held = held_bytes(lambda: made.append(plan(op, source, SHAPE, dtype)))
    (p,) = made
    assert p.explanation.chosen == "reference"
    assert abs(held - p.workspace_bytes - p.parameter_bytes) <= CONSTANT
    if scheme == "int4:g32" and op in ("quantize", "dequantize"):
        assert p.allocates == "codes of 4 bits are packed in temporary tensors"
        return
    assert p.allocates is None
    assert tensor_bytes(lambda: p.run(*inputs, out=out)) <= SCALARS
    assert python_bytes(lambda: p.run(*inputs, out=out)) <= CONSTANT


@pytest.mark.parametrize("op", ["quantize", "fake_quantize", "fake_quantize_backward"])
def test_a_plan_for_strided_tensors_holds_their_copies(op: str) -> None:
    x = torch.randn(SHAPE[::-1]).t()
    inputs = (x, x) if op == "fake_quantize_backward" else (x,)
    out = plan(op, "int4:g32", SHAPE, strides=x.stride()).run(*inputs)
    made: list[Plan] = []
    held = held_bytes(lambda: made.append(plan(op, "int4:g32", SHAPE, strides=x.stride())))
    (p,) = made
    assert p.workspace_bytes >= len(inputs) * x.nbytes
    assert abs(held - p.workspace_bytes - p.parameter_bytes) <= CONSTANT
    assert tensor_bytes(lambda: p.run(*inputs, out=out)) <= TRANSPOSING < LEAST_GROWING
    assert python_bytes(lambda: p.run(*inputs, out=out)) <= CONSTANT


@pytest.mark.parametrize(
    ("scheme", "dtype", "reason"),
    [
        ("int8:token", torch.float64, "backend reference computes in temporary tensors"),
        ("int8:token:round=stochastic(7)", torch.float32, "backend reference computes in temporary tensors"),
        ("int4:g32:scale=linear_up/float16", torch.float32, "scales that are rounded up are chosen by"),
    ],
)
def test_a_plan_that_takes_memory_says_why(scheme: str, dtype: torch.dtype, reason: str) -> None:
    p, inputs = plan("quantize", scheme, SHAPE, dtype), inputs_of("quantize", scheme, dtype)
    assert p.allocates is not None
    assert reason in p.allocates
    out = p.empty()
    assert tensor_bytes(lambda: p.run(*inputs, out=out)) > LEAST_GROWING


def test_the_measures_notice_memory() -> None:
    x = torch.zeros(1000)
    assert tensor_bytes(x.clone) == 4000
    # Taken and given back at once, inside an operator.
    assert tensor_bytes(lambda: torch.var_mean(x.double())) >= 8000
    assert 8000 <= python_bytes(lambda: np.zeros(1000).sum()) <= 8000 + CONSTANT
    kept: list[object] = []
    assert abs(held_bytes(lambda: kept.append(x.repeat(1000))) - 4_000_000) <= CONSTANT
    assert abs(held_bytes(lambda: kept.append(np.zeros(1_000_000))) - 8_000_000) <= CONSTANT


def test_an_operator_without_out_is_noticed() -> None:
    x = torch.randn(SHAPE)
    assert tensor_bytes(lambda: zp.quantize(x, "int8:token")) > x.numel()
