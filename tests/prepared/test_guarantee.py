"""What a plan guarantees is true: bytes, whatever the threads and the backend, and the arithmetic."""

from typing import Any

import pytest
import torch

import zeropoint as zp
from zeropoint.layout.blocks import spread_blocks
from zeropoint.ops.threads import thread_limit
from zeropoint.prepared import Guarantee, plan

OPS = ("quantize", "dequantize", "fake_quantize", "fake_quantize_backward")
SCHEMES = (
    "int8:tensor", "int8:channel-1", "int3:g24", "uint4:g32:asym", "float8_e4m3fn:block16x32", "nf4:g64",
    "mxfp4", "nvfp4",
)  # fmt: skip
# Rows that threads cannot share evenly, in number and in elements, and enough work for several threads.
SHAPE = (701, 1443)
INTEGERS = ("int8:tensor", "int8:token", "int4:g32", "uint8:channel:asym")


def tensors(result: torch.Tensor | zp.QuantizedTensor) -> list[torch.Tensor]:
    """Return every tensor of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [result.data, *result.scales, *([] if result.zero_point is None else [result.zero_point])]


def same(a: Any, b: Any) -> bool:
    """Compare two results byte for byte."""
    pairs = zip(tensors(a), tensors(b), strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and _bytes(x) == _bytes(y) for x, y in pairs)


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def inputs_of(op: str, source: str | zp.QuantizationParams, x: torch.Tensor) -> tuple[Any, ...]:
    """Return what a plan for ``op`` runs on; half as large again as the data of given parameters."""
    if op == "dequantize":
        return (zp.quantize(x, source),)
    return (x.flip(0), x * 1.5) if op == "fake_quantize_backward" else (x * 1.5,)


@pytest.mark.crossed
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_neither_threads_nor_repetition_nor_the_backend_change_a_byte(scheme: str, op: str) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for source in (scheme, zp.quantize(x, scheme).params):
        fast, inputs = plan(op, source, SHAPE, x.dtype), inputs_of(op, source, x)
        with zp.only_backend("reference"):
            slow = plan(op, source, SHAPE, x.dtype)
        names = [p.explanation.chosen for p in (fast, slow)]
        assert names == ["cpu", "reference"]
        assert fast.guarantee == slow.guarantee
        assert fast.guarantee == Guarantee(arithmetic=torch.float32)
        expected = slow.run(*inputs)
        for threads in (1, 2, 7):
            with thread_limit(threads):
                assert same(fast.run(*inputs), expected), f"{threads} threads"
        assert same(fast.run(*inputs), expected), "another run"


@pytest.mark.parametrize("op", ["quantize", "fake_quantize"])
def test_stochastic_rounding_is_deterministic_too(op: str) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    first, again, other = (plan(op, f"int8:token:round=stochastic({seed})", (64, 96)) for seed in (5, 5, 6))
    result = first.run(x)
    torch.manual_seed(99)
    assert same(again.run(x), result)
    # Two runs of a plan with another seed agree with each other alone.
    assert not same(tensors(other.run(x))[0], tensors(result)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_arithmetic_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    for op in OPS:
        assert plan(op, "int8:token", (2, 8), dtype).guarantee.arithmetic is expected


def near_ties(scale: torch.Tensor) -> torch.Tensor:
    """Return float64 quotients a hair above ties, which float32 takes for the ties themselves."""
    steps = torch.arange(-100, 101, dtype=torch.float64) + 0.5
    return steps * scale * (1 + 2.0**-40)


def test_float64_is_computed_in_float64() -> None:
    params = zp.QuantizationParams.from_range("int8:tensor", -100.0, 100.0, dtype=torch.float64)
    x = near_ties(params.scales[0].double())
    # Half to even sends half of the ties towards zero, and none of the numbers past them.
    wanted = (x / params.scales[0].double()).round()
    assert not torch.equal(wanted, (x.float() / params.scales[0]).round().double())
    p = plan("quantize", params, tuple(x.shape), torch.float64)
    assert p.guarantee.arithmetic is torch.float64
    assert torch.equal(p.run(x).codes.double(), wanted.clamp(-128, 127))
    values = plan("fake_quantize", params, tuple(x.shape), torch.float64).run(x)
    assert torch.equal(values, wanted.clamp(-128, 127) * params.scales[0].double())
    assert not torch.equal(values, values.float().double())


def test_float32_is_computed_in_float32() -> None:
    params = zp.QuantizationParams.from_range("int8:tensor", -100.0, 100.0)
    (scale,) = params.scales
    steps = torch.arange(-100, 101, dtype=torch.float32) + 0.5
    # Numbers whose float32 quotient is a tie though their exact quotient is none.
    x = steps * scale
    exact = x.double() / scale.double()
    rounded = x / scale
    assert bool(((rounded == steps) & (exact != steps.double())).any())
    for name in ("cpu", "reference"):
        with zp.only_backend(name):
            p = plan("quantize", params, tuple(x.shape))
        assert p.guarantee.arithmetic is torch.float32
        assert torch.equal(p.run(x).codes.float(), rounded.round().clamp(-128, 127))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", INTEGERS)
def test_forward_and_backward_agree_on_every_element(scheme: str, dtype: torch.dtype) -> None:
    shape = (32, 64)
    generator = torch.Generator().manual_seed(8)
    params = zp.quantize(torch.randn(shape, generator=generator).to(dtype), scheme).params
    x = (torch.randn(shape, generator=generator) * 2).to(dtype)
    wide, kept = params.scheme, plan("fake_quantize_backward", params, shape, dtype)
    passed = kept.run(torch.ones(shape, dtype=dtype), x) != 0
    codes = plan("quantize", params, shape, dtype).run(x).codes
    outside = ((codes == wide.qmin) | (codes == wide.qmax)) & ~passed
    # What is not passed was clipped to an end; what lies between the ends is passed.
    assert torch.equal(~passed, outside)
    assert bool(passed.any())
    assert bool(outside.any())
    # A clipped value moves no further when its input does; a passed one is within half a step of its input.
    values = plan("fake_quantize", params, shape, dtype).run(x)
    scale = params.effective_scale()
    assert scale is not None
    blocks = spread_blocks(scale, wide.granularity, shape)
    slack = 0.5 + 2.0**-6 if dtype in (torch.bfloat16, torch.float16) else 0.5 + 2.0**-20
    error = (values.double() - x.double()).abs() / blocks.double()
    limit = slack + values.double().abs() / blocks.double() * torch.finfo(dtype).eps
    assert bool((error <= limit)[passed].all())
