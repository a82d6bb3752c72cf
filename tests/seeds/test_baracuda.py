"""The quantize plans of baracuda-kernels: a test for each thing that their documentation names.

The formula is ``clamp(round(x / scale[c]) + zero_point[c], q_min, q_max)``, ties to even, anew in numpy.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.ops.registry import explain
from zeropoint.prepared import Plan, can_implement, plan
from zeropoint.training import dequantize_ste, quantize_ste

SHAPE = (3, 4, 5, 6)
INPUTS = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float32,
    torch.bfloat16: np.float32,
}
"""Dtype of a tensor to that in which the formula is computed; 16-bit floats are exact in float32."""


def numbers(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 20
    ties = torch.arange(x.numel()).reshape(shape) % 7 == 0
    return torch.where(ties, (x / 0.5).round() * 0.5 + 0.25, x).to(dtype)


def given(dtype: torch.dtype, output: str, axis: int, count: int, seed: int = 1) -> zp.QuantizationParams:
    """Return scales in the dtype of the input and int32 zero points, flat vectors of an axis."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.5, 0.25, 0.125, 0.3, 0.11, 1.0])[:count].to(dtype)
    middle = 0 if output == "int8" else 128
    zeros = torch.randint(-20, 20, (count,), generator=generator, dtype=torch.int32) + middle
    scheme = f"{output}:asym:scale=input"
    return zp.QuantizationParams.given(scheme, scale, zeros, axis=axis, dtype=dtype)


def column(values: torch.Tensor | None, axis: int, rank: int, kind: Any) -> np.ndarray:
    """Return a vector of an axis so that it broadcasts."""
    assert values is not None
    sides = [-1 if place == axis % rank else 1 for place in range(rank)]
    result: np.ndarray = values.flatten().double().numpy().astype(kind).reshape(sides)
    return result


def formula(
    x: torch.Tensor, params: zp.QuantizationParams, axis: int, limits: tuple[int, int] | None = None
) -> np.ndarray:
    kind = INPUTS[x.dtype]
    s, z = (column(t, axis, x.dim(), kind) for t in (params.scales[0], params.zero_point))
    low, high = limits or (params.scheme.qmin, params.scheme.qmax)
    result: np.ndarray = np.clip(np.rint(x.double().numpy().astype(kind) / s) + z, low, high)
    return result


def codes(p: Plan, x: torch.Tensor) -> np.ndarray:
    result: np.ndarray = p.run(x).codes.numpy()
    return result


def agrees(dtype: torch.dtype, output: str, axis: int = 1) -> bool:
    """Return whether a plan gives what the formula says, on values with planted ties."""
    x, params = numbers(dtype), given(dtype, output, axis, SHAPE[axis])
    wanted = formula(x, params, axis)
    assert len(np.unique(wanted)) > 50
    return np.array_equal(codes(plan("quantize", params, SHAPE, dtype), x), wanted)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_quantize_per_channel_plan(axis: int) -> None:
    assert agrees(torch.float32, "int8", axis)
    x, params = numbers(torch.float32), given(torch.float32, "uint8", axis, SHAPE[axis])
    q = plan("quantize", params, SHAPE).run(x)
    s, z = (column(t, axis, 4, np.float32) for t in (params.scales[0], params.zero_point))
    values = plan("dequantize", params, SHAPE).run(q).numpy()
    assert np.array_equal(values, (q.codes.numpy().astype(np.float32) - z) * s)


@pytest.mark.parametrize("output", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", INPUTS)
def test_formula(dtype: torch.dtype, output: str) -> None:
    assert all(agrees(dtype, output, axis) for axis in range(4))


def test_round_ties_to_even() -> None:
    p = plan("quantize", zp.QuantizationParams.new(1.0), (6,))
    assert codes(p, torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])).tolist() == [0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("limits", [(-127, 127), (-7, 100), (3, 3)])
def test_q_min_and_q_max_of_the_caller(limits: tuple[int, int]) -> None:
    x, params = numbers(torch.float32), given(torch.float32, "int8", 1, 4)
    p = plan("quantize", params, SHAPE).within(*limits)
    assert np.array_equal(codes(p, x), formula(x, params, 1, limits))
    for wrong in ((0.5, 3), (0, 3.0), (True, 3)):
        with pytest.raises(zp.RangeError, match="must be two whole numbers"):
            p.within(*wrong)  # type: ignore[arg-type]


def test_quantize_per_token_plan() -> None:
    x = numbers(torch.float32, (7, 40))
    scale = np.abs(x.numpy()).max(1, keepdims=True) / np.float32(127.5)
    wanted = np.clip(np.rint(x.numpy() / scale), -128, 127)
    assert np.array_equal(codes(plan("quantize", "int8:token", (7, 40)), x), wanted)


def test_quantize_per_tensor_plan() -> None:
    x = numbers(torch.float32, (7, 40))
    scale = np.abs(x.numpy()).max() / np.float32(127.5)
    assert np.array_equal(codes(plan("quantize", "int8:tensor", (7, 40)), x), np.rint(x.numpy() / scale))


@pytest.mark.parametrize("limits", [None, (-40, 30)])
@pytest.mark.parametrize("dtype", INPUTS)
def test_quantize_per_channel_backward_plan(dtype: torch.dtype, limits: tuple[int, int] | None) -> None:
    x, params, kind = numbers(dtype) * 4, given(dtype, "int8", 1, 4), INPUTS[dtype]
    grad = numbers(dtype, seed=5)
    s, z = (column(t, 1, 4, kind) for t in (params.scales[0], params.zero_point))
    low, high = limits or (-128, 127)
    steps = np.rint(x.double().numpy().astype(kind) / s) + z
    mask, slope = (low <= steps) & (steps <= high), grad.double().numpy().astype(kind)
    assert 0.1 < mask.mean() < 0.9
    backward = plan("quantize_backward", params, SHAPE, dtype)
    backward = backward if limits is None else backward.within(*limits)
    wanted = torch.from_numpy(np.where(mask, slope / s, 0)).to(dtype)
    assert torch.equal(backward.run(grad, x), wanted)
    assert torch.equal(
        plan("dequantize_backward", params, SHAPE, dtype).run(grad), torch.from_numpy(slope * s).to(dtype)
    )
    both = plan("fake_quantize_backward", params, SHAPE, dtype)
    both = both if limits is None else both.within(*limits)
    assert torch.equal(both.run(grad, x), torch.from_numpy(np.where(mask, slope, 0)).to(dtype))


def test_backward_through_autograd_reaches_given_scales() -> None:
    x = numbers(torch.float64).requires_grad_()
    scale = torch.tensor([0.5, 0.25, 0.125, 0.3], dtype=torch.float64, requires_grad=True)
    zeros = torch.tensor([3, -3, 0, 9])
    params = zp.QuantizationParams.given("int8:scale=input", scale, zeros, axis=1, dtype=torch.float64)
    up = numbers(torch.float64, seed=5)
    s, z = column(scale.detach(), 1, 4, np.float64), column(zeros, 1, 4, np.float64)
    u = np.rint(x.detach().numpy() / s) + z
    v, mask, dy = np.clip(u, -128, 127), (u >= -128) & (u <= 127), up.numpy()

    found = torch.autograd.grad(quantize_ste(x, params), (x, scale), up)
    assert np.allclose(found[0].numpy(), mask * dy / s, rtol=1e-15)
    assert np.allclose(found[1].numpy(), -(mask * dy * x.detach().numpy() / s**2).sum((0, 2, 3)), rtol=1e-12)

    steps = torch.from_numpy(v).requires_grad_()
    y = dequantize_ste(steps, params)
    assert np.array_equal(y.detach().numpy(), (v - z) * s)
    found = torch.autograd.grad(y, (steps, scale), up)
    assert np.allclose(found[0].numpy(), dy * s, rtol=1e-15)
    assert np.allclose(found[1].numpy(), (dy * (v - z)).sum((0, 2, 3)), rtol=1e-12)

    y = zp.fake_quantize(x, params)
    assert np.array_equal(y.detach().numpy(), (v - z) * s)
    found = torch.autograd.grad(y, (x, scale), up)
    assert np.allclose(found[0].numpy(), mask * dy, rtol=1e-15)
    assert np.allclose(
        found[1].numpy(), (dy * ((v - z) - mask * x.detach().numpy() / s)).sum((0, 2, 3)), rtol=1e-9
    )

    q = zp.quantize(x.detach(), params)
    (found_scale,) = torch.autograd.grad(q.dequantize(), scale, up)
    assert np.allclose(found_scale.numpy(), (dy * (v - z)).sum((0, 2, 3)), rtol=1e-12)


@pytest.mark.parametrize("text", ["int4:g16", "float4_e2m1fn:channel", "uint4:tensor:asym=real", "nf4:g64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_scales_change_no_value(text: str, dtype: torch.dtype) -> None:
    x = numbers(dtype, (8, 64))
    params = zp.choose_params(x, text)
    wanted = zp.fake_quantize(x, params)
    params.scales[0].requires_grad_()
    y = zp.fake_quantize(x, params)
    assert torch.equal(y, wanted)
    (found,) = torch.autograd.grad(y.float().square().sum(), params.scales[0])
    assert bool((found != 0).all())
    assert torch.equal(zp.quantize(x, params).codes, zp.quantize(x, text).codes)
    assert torch.equal(plan("quantize", params, (8, 64), dtype).run(x).codes, zp.quantize(x, text).codes)


def test_input_f32() -> None:
    assert agrees(torch.float32, "int8")


def test_input_f64() -> None:
    assert agrees(torch.float64, "int8")
    # Just past a tie, which float32 does not see.
    p = plan("quantize", zp.QuantizationParams.new(1.0), (1,), torch.float64)
    assert codes(p, torch.tensor([0.5 + 2.0**-40], dtype=torch.float64)).tolist() == [1]


def test_input_f16() -> None:
    assert agrees(torch.float16, "int8")


def test_input_bf16() -> None:
    assert agrees(torch.bfloat16, "int8")


def test_output_s8() -> None:
    q = plan("quantize", given(torch.float32, "int8", 1, 4), SHAPE).run(numbers(torch.float32))
    assert q.codes.dtype is torch.int8
    assert agrees(torch.float32, "int8")


def test_output_u8() -> None:
    q = plan("quantize", given(torch.float32, "uint8", 1, 4), SHAPE).run(numbers(torch.float32))
    assert q.codes.dtype is torch.uint8
    assert agrees(torch.float32, "uint8")


def test_scale_in_the_dtype_of_the_input() -> None:
    for dtype in INPUTS:
        params = given(dtype, "int8", 1, 4)
        assert params.scales[0].dtype is dtype
        assert agrees(dtype, "int8")


def test_zero_point_int32() -> None:
    params = given(torch.float32, "int8", 1, 4)
    assert params.zero_point is not None
    assert params.zero_point.dtype is torch.int32
    long = zp.QuantizationParams(
        scheme=params.scheme, shape=params.shape, scales=params.scales, zero_point=params.zero_point.long()
    )
    with pytest.raises(zp.SchemeError, match=r"zero_point \(dtype torch.int64\) must be torch.int32"):
        plan("quantize", long, SHAPE)


def test_s4_and_u4_deferred_there() -> None:
    for output, low, high in (("int4", -8, 7), ("uint4", 0, 15)):
        params = zp.QuantizationParams.given(output, [0.5, 2.0, 4.0, 8.0], [1, 2, 3, 4], axis=1)
        x = numbers(torch.float32)
        q = plan("quantize", params, SHAPE).run(x)
        assert np.array_equal(q.codes.numpy(), formula(x, params, 1, (low, high)))
        assert q.data.numel() == x.numel() // 2


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 2, 2, 2, 4)])
def test_rank_4_and_lower_ranks_padded(shape: tuple[int, ...]) -> None:
    x, params = numbers(torch.float32, shape), given(torch.float32, "int8", -1, 4)
    assert np.array_equal(codes(plan("quantize", params, shape), x), formula(x, params, -1))


def test_axis_in_0_to_4() -> None:
    for axis in (-4, -3, -2, -1, 0, 1, 2, 3):
        assert agrees(torch.float32, "uint8", axis)
    with pytest.raises(zp.ShapeError, match="needs at least 5 axes"):
        plan("quantize", "int8:channel4", SHAPE)


def test_per_channel_vectors_of_length_shape_axis() -> None:
    scale, zeros = torch.tensor([0.5, 0.25, 0.125, 0.3]), torch.tensor([1, 2, 3, 4])
    params = zp.QuantizationParams.given("int8", scale, zeros, axis=1)
    params.validate()
    x = numbers(torch.float32)
    wanted = formula(x, params, 1)
    assert np.array_equal(codes(plan("quantize", params, SHAPE), x), wanted)
    assert np.array_equal(zp.quantize(x, params).codes.numpy(), wanted)
    with pytest.raises(zp.ShapeError, match="do not fit a tensor of shape"):
        plan("quantize", zp.QuantizationParams.given("int8", scale[:3], axis=1), SHAPE)
    with pytest.raises(zp.ShapeError, match=r"zero_point .* must be one number, or a vector of 4"):
        zp.QuantizationParams.given("int8", scale, zeros[:3], axis=1)


def test_q_max_not_below_q_min() -> None:
    p = plan("quantize", given(torch.float32, "int8", 1, 4), SHAPE)
    with pytest.raises(zp.RangeError, match=r"code range 5\.\.3 must lie in"):
        p.within(5, 3)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (3, 2, 1, 0), (0, 2, 3, 1)])
def test_strided_deferred_there(order: tuple[int, ...]) -> None:
    x = numbers(torch.float32).permute(order)
    shape = tuple(x.shape)
    params = given(torch.float32, "int8", 1, shape[1])
    p = plan("quantize", params, shape, strides=x.stride())
    assert np.array_equal(codes(p, x), formula(x, params, 1))


def test_workspace_none() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for op in ("quantize", "dequantize", "fake_quantize", "fake_quantize_backward", "quantize_backward"):
            p = plan(op, given(dtype, "int8", 1, 4), SHAPE, dtype)
            assert p.workspace_bytes == 0
            assert 0 < p.parameter_bytes <= 3 * 4 * 4
    double = given(torch.float64, "int8", 1, 4)
    sizes = [
        plan("quantize", double, (rows, 4, 50), torch.float64).workspace_bytes for rows in (100, 2000, 20000)
    ]
    assert sizes[0] < sizes[1] == sizes[2] <= (1 << 20) + 16
    for op in ("dequantize", "fake_quantize"):
        assert plan(op, double, SHAPE, torch.float64).workspace_bytes <= 16


def test_deterministic_and_bit_stable() -> None:
    x, params = numbers(torch.float32, (64, 4, 500)), given(torch.float32, "uint8", 1, 4)
    p = plan("quantize", params, (64, 4, 500))
    assert (p.guarantee.deterministic, p.guarantee.bit_stable) == (True, True)
    wanted, threads = p.run(x).data, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(p.run(x).data, wanted)
    finally:
        torch.set_num_threads(threads)
    slow = plan("quantize", params, (64, 4, 500), backend="reference")
    assert torch.equal(slow.run(x).data, wanted)


def test_select() -> None:
    p = plan("quantize", given(torch.float32, "int8", 1, 4), SHAPE)
    assert p.explanation.chosen == "cpu"
    for error, arguments in (
        (zp.ShapeError, ("quantize", "int8:channel7", SHAPE)),
        (zp.DtypeError, ("quantize", "int8", SHAPE, torch.int8)),
        (zp.ShapeError, ("quantize", "int8", (-1,))), (zp.UnsupportedError, ("multiply", "int8", SHAPE)),
    ):  # fmt: skip
        with pytest.raises(error):
            plan(*arguments)  # type: ignore[arg-type]


def test_plan_preference() -> None:
    for backend in ("cpu", "reference"):
        p = plan("quantize", "int8:channel", (4, 8), backend=backend)
        assert p.explanation.chosen == backend
        assert p.identity.startswith(backend)
    with pytest.raises(zp.UnsupportedError, match=r"backend 'cpu' cannot run quantize: torch\.float64 is"):
        plan("quantize", "int8", (4,), torch.float64, backend="cpu")
    limited = plan("quantize", zp.QuantizationParams.new(1.0), (4,), backend="reference").within(-3, 3)
    assert limited.explanation.chosen == "reference"


def test_can_implement() -> None:
    x, params = numbers(torch.float32), given(torch.float32, "int8", 1, 4)
    p = plan("quantize", params, SHAPE)
    p.check(x)
    p.check(x, out=p.empty())
    for wrong in (x.double(), x[:, :3], x.permute(3, 2, 1, 0)):
        with pytest.raises(zp.ZeropointError, match="make a plan for it"):
            p.check(wrong)
    with pytest.raises(zp.ShapeError, match=r"out .* must be a result for int8:channel1:asym"):
        p.check(x, out=zp.quantize(x, "int8"))
    q = p.run(x)
    plan("dequantize", params, SHAPE).check(q)
    for op in ("fake_quantize_backward", "quantize_backward"):
        with pytest.raises(zp.ZeropointError, match="make a plan for it"):
            plan(op, params, SHAPE).check(x, x[0])
    with pytest.raises(zp.DtypeError, match="make a plan for it"):
        plan("dequantize_backward", params, SHAPE).check(x.double())
    assert can_implement("quantize", params, SHAPE).chosen == "cpu"
    for arguments in (
        ("quantize", "int8:channel7", SHAPE), ("quantize", "int8", SHAPE, torch.int8),
        ("multiply", "int8", SHAPE), ("quantize", "float8:asym", SHAPE), ("quantize_backward", "int8", SHAPE),
        ("quantize", params, (2, 2)),
    ):  # fmt: skip
        answer = can_implement(*arguments)  # type: ignore[arg-type]
        assert not answer
        assert answer.chosen is None
        assert str(answer).startswith("nothing runs (request: ")


def test_workspace_size() -> None:
    p = plan("quantize", "int8:channel1", SHAPE)
    assert p.workspace_bytes > 0
    assert p.parameter_bytes == 0


def test_sku() -> None:
    params = given(torch.float32, "int8", 1, 4)
    assert plan("quantize", params, SHAPE).identity == (
        "cpu/quantize/int8:channel1:asym:scale=input/float32[3, 4, 5, 6]/given"
    )
    assert plan("quantize_backward", params, SHAPE).within(-3, 3).identity.endswith("/given/codes[-3..3]")


def test_precision_guarantee() -> None:
    found = [plan("quantize", "int8", (4,), dtype).guarantee.arithmetic for dtype in INPUTS]
    assert found == [torch.float32, torch.float64, torch.float32, torch.float32]


def test_run() -> None:
    x, params = numbers(torch.float32), given(torch.float32, "uint8", 2, 5)
    p = plan("quantize", params, SHAPE)
    out = p.empty()
    assert p.run(x, out=out).data.data_ptr() == out.data.data_ptr()
    assert np.array_equal(out.codes.numpy(), formula(x, params, 2))


def test_errors_as_result() -> None:
    x = torch.ones(4)
    p = plan("quantize", "int8", (4,))
    with pytest.raises(zp.DtypeError, match=r"out .a Tensor. must be a QuantizedTensor"):
        p.run(x, out=torch.zeros(4, dtype=torch.int8))
    with pytest.raises(zp.DtypeError, match=r"out .a Tensor. must be a QuantizedTensor"):
        zp.quantize(x, "int8", out=torch.zeros(4, dtype=torch.int8))  # type: ignore[arg-type]
    with pytest.raises(zp.UnsupportedError, match=r"device \(='abacus'\) is not there"):
        plan("quantize", "int8", (4,), device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(zp.UnsupportedError, match=r"device \(='cuda'\) is not there"):
            plan("quantize", "int8", (4,), device="cuda")
    scale = torch.ones(1, requires_grad=True)
    params = zp.QuantizationParams.given("int8", scale)
    assert plan("quantize", params, (4,)).run(x).codes.tolist() == [1] * 4
    assert zp.quantize(x, params).codes.tolist() == [1] * 4


def test_stream() -> None:
    """Kernels of the host are for the host, where calls wait; other devices take others."""
    p = plan("quantize", "int8", (4,))
    here = p.signature.request(p.signature.op)
    assert explain(here).chosen == "cpu"
    there = explain(replace(here, device=torch.device("cuda", 0)))
    assert there.chosen != "cpu"
    assert there.reasons["cpu"] == "the data is on cuda:0"
    reported = can_implement("quantize", "int8", (4,), device="meta")
    assert "holds no data to run on" in reported.reasons["request"]


def test_send_and_sync() -> None:
    x, params = numbers(torch.float32), given(torch.float32, "int8", 1, 4)
    p = plan("quantize", params, SHAPE)
    wanted = formula(x, params, 1)
    with ThreadPoolExecutor(3) as pool:
        assert all(np.array_equal(found, wanted) for found in pool.map(lambda _: codes(p, x), range(12)))
