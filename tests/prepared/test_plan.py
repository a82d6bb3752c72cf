"""A plan gives the bytes of the operators, takes only the tensors it is for, and says what it is."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.ops import registry
from zeropoint.ops.in_place import CHUNK
from zeropoint.ops.reference_backend import Reference
from zeropoint.ops.registry import Kernel, Request
from zeropoint.prepared import Plan, can_implement, plan

SCHEMES = (
    "int8", "int8:narrow", "int8:channel", "int8:channel1", "int8:channel-1", "int8:token",
    "int4:g32", "int3:g8", "int6:token", "uint8:token", "uint8:tensor:asym", "uint8:channel:asym",
    "uint8:channel-1:asym",
    "uint4:g32:asym", "int8:channel1:asym=real", "uint4:g32:asym:scale=float16", "int4:g32:scale=bfloat16",
    "int4:g32:scale=input", "int4:block4x16", "uint4:block4x16:asym", "float8_e4m3fn:block16x32", "nf4:g64",
    "ternary:token", "mxfp4", "mxfp4:scale=even", "mxfp8_e5m2", "mxint8", "nvfp4", "mx6", "mx9", "int8:g64",
    "float8_e4m3fn:cast", "float8_e4m3fn:tensor", "float8_e4m3fn:block16x32:scale=ceil",
    "float4_e2m1fn:block2x16:scale=ue4m3:scale2=float32@tensor", "int4:g32:scale=linear_up/float16",
    "int16:token", "nvfp4:dialect=compressed-tensors",
    "uint4:g32:asym:dialect=compressed-tensors:scale=input",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPE = (5, 18, 96)


def sample(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normal data with a spread of rows, a row of zeros, and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if x.ndim and x.numel():
        x = x * torch.exp(torch.randn((*shape[:-1], 1), generator=generator))
        x.view(-1)[::7], x.view(-1)[3::11] = 0.0, -0.0
    if x.ndim > 1 and len(x) > 1:
        x[1] = 0.0
    return x.to(dtype)


def fitting(x: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return data that the scheme has codes for: without zero points, unsigned ones have none below 0."""
    return x.abs() if scheme == "uint8:token" else x


def assert_same_results(a: zp.QuantizedTensor, b: zp.QuantizedTensor) -> None:
    """Compare codes, scales and zero points, byte for byte."""
    assert same_bytes(a.data, b.data)
    assert all(same_bytes(mine, theirs) for mine, theirs in zip(a.scales, b.scales, strict=True))
    assert (a.zero_point is None) == (b.zero_point is None)
    assert a.zero_point is None or b.zero_point is None or same_bytes(a.zero_point, b.zero_point)
    assert (a.scheme, a.shape, a.dtype) == (b.scheme, b.shape, b.dtype)


def gradient(x: torch.Tensor, slope: torch.Tensor, params: zp.QuantizationParams) -> torch.Tensor:
    """Return the gradient that autograd takes through the operator."""
    leaf = x.clone().requires_grad_()
    zp.fake_quantize(leaf, params).backward(slope)
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plan_gives_the_bytes_of_the_operators(scheme: str, dtype: torch.dtype) -> None:
    shape = SHAPE if "block" not in scheme else SHAPE[1:]
    quantizing, dequantizing = (plan(op, scheme, shape, dtype) for op in ("quantize", "dequantize"))
    faking, going_back = (
        plan(op, scheme, shape, dtype) for op in ("fake_quantize", "fake_quantize_backward")
    )
    q, values = quantizing.empty(), dequantizing.empty()
    # Twice with the same memory: what one run leaves behind must not reach the next.
    for seed in (1, 2):
        x = fitting(sample(shape, dtype, seed), scheme)
        slope = sample(shape, dtype, seed + 10)
        expected = zp.quantize(x, scheme)
        assert quantizing.run(x, out=q) is q
        assert_same_results(q, expected)
        assert dequantizing.run(q, out=values) is values
        assert same_bytes(values, expected.dequantize())
        assert same_bytes(faking.run(x), values)
        assert same_bytes(going_back.run(slope, x), gradient(x, slope, expected.params))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plan_with_given_parameters_gives_the_bytes_of_the_operators(
    scheme: str, dtype: torch.dtype
) -> None:
    shape = SHAPE if "block" not in scheme else SHAPE[1:]
    params = zp.quantize(fitting(sample(shape, dtype), scheme), scheme).params
    # Larger than the data of the parameters, so that something is clipped.
    x, slope = sample(shape, dtype, seed=1) * 1.5, sample(shape, dtype, seed=2)
    expected = zp.quantize(x, params)
    q = plan("quantize", params, shape, dtype).run(x)
    assert_same_results(q, expected)
    assert same_bytes(plan("dequantize", params, shape, dtype).run(q), expected.dequantize())
    assert same_bytes(plan("fake_quantize", params, shape, dtype).run(x), zp.fake_quantize(x, params))
    going_back = plan("fake_quantize_backward", params, shape, dtype)
    assert same_bytes(going_back.run(slope, x), gradient(x, slope, params))


@pytest.mark.parametrize("scheme", ["int8:channel", "uint8:channel:asym"])
def test_pieces_of_a_large_float64_have_the_scales_of_their_rows(scheme: str) -> None:
    x = sample((5, CHUNK // 2), torch.float64)
    params, shape = zp.choose_params(x, scheme), tuple(x.shape)
    q = plan("quantize", params, shape, x.dtype).run(x)
    assert_same_results(q, zp.quantize(x, params))
    assert same_bytes(plan("dequantize", params, shape, x.dtype).run(q), q.dequantize())


@pytest.mark.crossed
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 4), (7,), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("scheme", ["int8:tensor", "uint8:tensor:asym", "int8:token", "int4:g3", "mxfp4"])
def test_a_plan_takes_any_shape(scheme: str, shape: tuple[int, ...]) -> None:
    if not shape and "tensor" not in scheme:
        with pytest.raises(zp.ShapeError, match=r"needs at least 1 axes, got shape \(\)"):
            plan("quantize", scheme, shape)
        return
    x = sample(shape)
    expected = zp.quantize(x, scheme)
    assert_same_results(plan("quantize", scheme, shape).run(x), expected)
    assert_same_results(plan("quantize", expected.params, shape).run(x), expected)
    assert same_bytes(plan("dequantize", scheme, shape).run(expected), expected.dequantize())
    assert same_bytes(plan("fake_quantize", scheme, shape).run(x), expected.dequantize())
    assert same_bytes(
        plan("fake_quantize_backward", scheme, shape).run(x, x), gradient(x, x, expected.params)
    )


STRIDED = {
    "transposed": lambda x: x.transpose(0, 1),
    "every second row": lambda x: x[::2],
    "every second column": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:1].expand(4, 18, 96),
}


@pytest.mark.crossed
@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("op", ["quantize", "fake_quantize", "fake_quantize_backward"])
def test_a_plan_for_strides_takes_tensors_of_those_strides(op: str, view: str) -> None:
    x = STRIDED[view](sample())
    before = x.clone()
    inputs = (x, x) if op == "fake_quantize_backward" else (x,)
    shape = tuple(x.shape)
    strided = plan(op, "int8:channel", shape, strides=x.stride())
    result = strided.run(*inputs)
    expected = plan(op, "int8:channel", shape).run(*(i.contiguous() for i in inputs))
    if op == "quantize":
        assert_same_results(result, expected)
    else:
        assert same_bytes(result, expected)
        assert result.is_contiguous()
    assert torch.equal(x, before)
    assert strided.workspace_bytes >= len(inputs) * x.numel() * 4


def test_a_plan_that_copies_its_input_serves_one_thread_at_a_time() -> None:
    x = sample().transpose(0, 1)
    params, shape = zp.choose_params(x, "int8:channel"), tuple(x.shape)
    assert plan("quantize", params, shape).signature.reentrant
    assert not plan("quantize", params, shape, strides=x.stride()).signature.reentrant


def test_a_plan_for_contiguous_tensors_refuses_others() -> None:
    x = sample().transpose(0, 1)
    with pytest.raises(
        zp.ShapeError, match=r"x \(shape \(18, 5, 96\), strides \(96, 1728, 1\), on cpu\) must be"
    ):
        plan("quantize", "int8", (18, 5, 96)).run(x)


def test_a_plan_refuses_tensors_that_it_is_not_for() -> None:
    p = plan("fake_quantize", "int8", (2, 8))
    with pytest.raises(zp.ShapeError, match=r"x \(shape \(8, 2\).* must be torch.float32 of shape \(2, 8\)"):
        p.run(torch.zeros(8, 2))
    with pytest.raises(
        zp.DtypeError, match=r"x \(a Tensor of torch.float16\) must be a plain dense tensor of"
    ):
        p.run(torch.zeros(2, 8, dtype=torch.float16))
    with pytest.raises(zp.DtypeError, match=r"x \(a list of no dtype\) must be a plain dense tensor"):
        p.run([[0.0] * 8] * 2)
    with pytest.raises(zp.DtypeError, match="must be a plain dense tensor"):
        p.run(torch.zeros(2, 8).to_sparse())
    with pytest.raises(zp.ShapeError, match=r"on meta\) must be .* on cpu; make a plan for it"):
        p.run(torch.zeros(2, 8, device="meta"))


def test_a_plan_refuses_results_that_it_cannot_write() -> None:
    x = torch.ones(2, 8)
    p = plan("fake_quantize", "int8", (2, 8))
    with pytest.raises(zp.ShapeError, match=r"out \(shape \(16,\).* must be"):
        p.run(x, out=torch.zeros(16))
    with pytest.raises(zp.ShapeError, match="out must not share memory with the input"):
        p.run(x, out=x)
    with pytest.raises(zp.ShapeError, match=r"out \(requires_grad=True\) must not require a gradient"):
        p.run(x, out=torch.zeros(2, 8, requires_grad=True))
    q = plan("quantize", "int8", (2, 8))
    with pytest.raises(
        zp.ShapeError, match=r"out \(QuantizedTensor\(int4:tensor.* must be a result for int8:tensor"
    ):
        q.run(x, out=zp.quantize(x, "int4"))
    memory = torch.zeros(64, dtype=torch.uint8)
    inside = replace(q.empty(), data=memory[:16].reshape(2, 8))
    with pytest.raises(zp.ShapeError, match="out must not share memory with the input"):
        q.run(memory.view(torch.float32).reshape(2, 8), out=inside)


def test_a_plan_refuses_codes_that_it_is_not_for() -> None:
    x = sample((2, 8))
    q = zp.quantize(x, "int8")
    with pytest.raises(
        zp.ShapeError, match=r"q \(QuantizedTensor\(int8:tensor.* must be a result for int4:tensor"
    ):
        plan("dequantize", "int4", (2, 8)).run(q)
    with pytest.raises(zp.ShapeError, match="must have the parameters of the plan"):
        plan("dequantize", q.params, (2, 8)).run(zp.quantize(x * 2, "int8"))


def test_equal_parameters_are_the_parameters_of_the_plan() -> None:
    x = sample((2, 8))
    q = zp.quantize(x, "int8")
    again = zp.quantize(x, "int8")
    assert again.params is not q.params
    assert same_bytes(plan("dequantize", q.params, (2, 8)).run(again), q.dequantize())


def test_codes_of_half_precision_may_become_float32() -> None:
    q = zp.quantize(sample(dtype=torch.bfloat16), "int4:g32")
    assert same_bytes(plan("dequantize", q.params, SHAPE).run(q), q.dequantize(torch.float32))


@pytest.mark.parametrize("scheme", ["int8:tensor", "int8:token", "uint8:channel-1:asym", "nvfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_plan_names_the_place_of_a_number_that_is_not_finite(scheme: str, bad: float) -> None:
    x = sample()
    p = plan("quantize", scheme, SHAPE)
    expected = p.run(x)
    given = plan("quantize", expected.params, SHAPE)
    broken = x.clone()
    broken[2, 3, 4] = bad
    for prepared in (p, given):
        with pytest.raises(zp.NonFiniteError, match=r"at \(2, 3, 4\); 1 non-finite value in total"):
            prepared.run(broken)
        assert_same_results(prepared.run(x), expected)


def test_a_scale_that_does_not_fit_its_format_is_an_error() -> None:
    p = plan("quantize", "int8:tensor:scale=float16", (2, 8))
    with pytest.raises(zp.RangeError, match="does not fit"):
        p.run(torch.full((2, 8), 1e30))


def test_given_parameters_serve_any_shape_that_they_fit() -> None:
    x = sample((4, 8))
    params = zp.QuantizationParams.new(0.1, 3, "int8:tensor:asym")
    assert_same_results(plan("quantize", params, (4, 8)).run(x), zp.quantize(x, params))
    channels = zp.QuantizationParams.channel_wise(3)
    with pytest.raises(zp.ShapeError, match=r"do not fit a tensor of shape \(4, 8\)"):
        plan("quantize", channels, (4, 8))


def test_parameters_are_validated_by_the_plan() -> None:
    params = zp.QuantizationParams(scheme=zp.Scheme.parse("int8"), shape=(4,), scales=(torch.tensor([-1.0]),))
    with pytest.raises(zp.RangeError, match="must be finite and at least"):
        plan("quantize", params, (4,))


def test_later_changes_to_the_parameters_do_not_reach_the_kernel() -> None:
    for name in ("cpu", "reference"):
        with zp.only_backend(name):
            params = zp.QuantizationParams.new(0.5, 1, "int8:tensor:asym")
            p = plan("fake_quantize", params, (3,))
        x = torch.tensor([1.0, -2.0, 100.0])
        before = p.run(x)
        params.scales[0].fill_(7.0)
        assert same_bytes(p.run(x), before)


def test_another_operator_is_refused() -> None:
    with pytest.raises(
        zp.UnsupportedError, match=r"op \(='measure'\) must be one of quantize, dequantize, fake"
    ):
        plan("measure", "int8", (4,))


def test_tensors_without_meaning_are_refused() -> None:
    with pytest.raises(zp.DtypeError, match=r"dtype \(=torch.int32\) must be one of torch.float32"):
        plan("quantize", "int8", (4,), torch.int32)
    with pytest.raises(zp.ShapeError, match=r"shape \(=\(-1,\)\) must not have a negative length"):
        plan("quantize", "int8", (-1,))
    with pytest.raises(zp.ShapeError, match=r"strides \(=\(1,\)\) must number 2, as shape \(4, 4\)"):
        plan("quantize", "int8", (4, 4), strides=(1,))
    with pytest.raises(zp.ShapeError, match="needs at least 2 axes"):
        plan("quantize", "int8:channel1", (4,))


def test_reasons_are_given_for_each_backend_that_does_not_run() -> None:
    reported = can_implement("quantize", "int8:round=stochastic(1)", (4, 4))
    assert reported.chosen == "reference"
    assert reported.reasons == {
        "cpu": "rounding stochastic(1) has no kernel here",
        "triton": "the data is on cpu",
    }
    reported = can_implement("dequantize", "int8", (4, 4))
    assert reported.chosen == "cpu"
    assert reported.reasons == {"reference": "slower than cpu", "triton": "the data is on cpu"}


def test_a_backend_asked_for_runs_or_is_an_error() -> None:
    with zp.only_backend("reference"):
        slow = plan("quantize", "int8", (4, 4))
    assert slow.explanation.chosen == "reference"
    x = sample((4, 4))
    # The choice was made with the plan, not with its run.
    with zp.only_backend("cpu"):
        assert_same_results(slow.run(x), plan("quantize", "int8", (4, 4)).run(x))
        with pytest.raises(zp.UnsupportedError, match=r"'cpu' cannot run quantize: torch\.float64 is comp"):
            plan("quantize", "int8", (4, 4), torch.float64)


def test_an_identity_says_what_runs_on_what() -> None:
    params = zp.QuantizationParams.new(0.5)
    names = [
        plan("quantize", "int4:g32", (8, 64), torch.bfloat16).identity,
        plan("dequantize", params, (8,)).identity,
        plan("fake_quantize", params, (8,), torch.float64).within(-3, 4).identity,
        plan("fake_quantize_backward", "int8", (2, 3), strides=(1, 2)).identity,
    ]
    assert names == [
        "cpu/quantize/int4:g32/bfloat16[8, 64]/chosen",
        "cpu/dequantize/int8:tensor/float32[8]/given",
        "reference/fake_quantize/int8:tensor/float64[8]/given/codes[-3..4]",
        "cpu/fake_quantize_backward/int8:tensor/float32[2, 3]/strides[1, 2]/chosen",
    ]
    assert names[1] in repr(plan("dequantize", params, (8,)))


def test_a_plan_is_a_frozen_value() -> None:
    p = plan("quantize", "int8", (4,))
    assert isinstance(p, Plan)
    with pytest.raises(AttributeError, match="cannot assign to field 'workspace_bytes'"):
        p.workspace_bytes = 0  # type: ignore[misc]


def test_inputs_that_require_a_gradient_are_read_without_one() -> None:
    x = sample((4, 8)).requires_grad_()
    for op in ("fake_quantize", "quantize"):
        result = plan(op, "int8", (4, 8)).run(x)
        assert not (result.data if op == "quantize" else result).requires_grad
    weight = torch.nn.Parameter(sample((4, 8)))
    assert same_bytes(
        plan("fake_quantize", "int8", (4, 8)).run(weight), zp.fake_quantize(weight, "int8").detach()
    )


def test_a_plan_runs_in_a_thread_that_flushes_subnormal_numbers() -> None:
    x = sample((4, 64)) * 2.0**-130
    for scheme in ("int8:channel", "uint8:channel-1:asym", "nvfp4", "mxfp4"):
        expected = zp.quantize(x, scheme)
        given = plan("fake_quantize", expected.params, (4, 64))
        torch.set_flush_denormal(True)
        try:
            assert_same_results(plan("quantize", scheme, (4, 64)).run(x), expected)
            values = plan("dequantize", scheme, (4, 64)).run(expected)
            assert same_bytes(given.run(x), values)
        finally:
            torch.set_flush_denormal(False)
        assert same_bytes(values, expected.dequantize())


@pytest.mark.parametrize("scheme", ["int8:token", "uint8:channel-1:asym", "int8:tensor:asym=real", "int8:g5"])
@pytest.mark.parametrize("shape", [(37, 48), (480,)], ids=str)
def test_a_large_float64_tensor_is_cut_into_chunks(
    scheme: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, slope = sample(shape, torch.float64), sample(shape, torch.float64, seed=1)
    q = zp.quantize(x, scheme)
    values, passed = q.dequantize(), gradient(x * 1.5, slope, q.params)
    monkeypatch.setattr("zeropoint.ops.reference.CHUNK", 100)
    for op, inputs, expected in (
        ("dequantize", (q,), values),
        ("fake_quantize", (x,), values),
        ("fake_quantize_backward", (slope, x * 1.5), passed),
    ):
        p = plan(op, q.params, shape, torch.float64)
        assert p.allocates is None
        assert same_bytes(p.run(*inputs), expected)
    assert same_bytes(plan("quantize", q.params, shape, torch.float64).run(x).data, q.data)


def test_float64_numbers_that_are_not_finite_are_clipped_in_training() -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0], dtype=torch.float64)
    slope = torch.tensor([-1.0, float("inf"), -2.0, 3.0], dtype=torch.float64)
    params = zp.QuantizationParams.new(0.5, 2, "int8:tensor:asym")
    forward, backward = (
        plan(op, params, (4,), torch.float64) for op in ("fake_quantize", "fake_quantize_backward")
    )
    assert same_bytes(forward.run(x), zp.fake_quantize(x, params))
    assert same_bytes(backward.run(slope, x), gradient(x, slope, params))
    assert forward.allocates is None
    assert backward.allocates is None


def test_parameters_must_be_where_the_tensors_are() -> None:
    params = zp.QuantizationParams.new(0.5)
    with pytest.raises(zp.ShapeError, match=r"parameters \(on meta\) must be on cpu; use params.to\('cpu'\)"):
        plan("quantize", params.to("meta"), (4,))
    with pytest.raises(zp.UnsupportedError, match=r"device \(=meta\) holds no data to run on"):
        plan("quantize", "int8", (4,), device="meta")


@pytest.mark.parametrize("op", ["quantize", "fake_quantize", "fake_quantize_backward"])
def test_one_plan_with_given_parameters_runs_in_several_threads(op: str) -> None:
    batches = [sample((64, 512), seed=seed) for seed in range(24)]
    p = plan(op, zp.quantize(batches[0], "uint4:g32:asym").params, (64, 512))

    def run(x: torch.Tensor) -> torch.Tensor:
        result = p.run(x.flip(0), x) if op == "fake_quantize_backward" else p.run(x)
        return result.data if op == "quantize" else result

    expected = [run(x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(same_bytes, pool.map(run, batches), expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", ["int8:token", "uint4:g32:asym", "nvfp4"])
def test_a_plan_for_a_gpu_gives_the_bytes_of_the_host(scheme: str, dtype: torch.dtype) -> None:
    x = sample((16, 96), dtype)
    q = zp.quantize(x, scheme)
    for source in (scheme, q.params.to("cuda")):
        result = plan("quantize", source, (16, 96), dtype, device="cuda").run(x.cuda())
        assert_same_results(result.to("cpu"), q)
        values = plan("dequantize", source, (16, 96), dtype, device="cuda").run(result)
        assert same_bytes(values.cpu(), q.dequantize())
        faked = plan("fake_quantize", source, (16, 96), dtype, device="cuda").run(x.cuda())
        assert same_bytes(faked.cpu(), q.dequantize())


class Counting(Reference):
    """The reference under another name, first in rank, that counts its calls."""

    rank = 99

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def prepare(self, request: Request) -> Kernel:
        kernel = super().prepare(request)

        def run(*tensors: Any, **named: Any) -> Any:
            self.calls += 1
            return kernel.run(*tensors, **named)

        return SimpleNamespace(run=run)


@pytest.mark.parametrize("name", ["mine", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_backend_of_others_runs_what_is_planned(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    x = sample((4, 8), dtype)
    expected = zp.quantize(x, "int8:token")
    other = Counting(name)
    request.addfinalizer(registry.choose.cache_clear)
    request.addfinalizer(registry.kernel_of.cache_clear)
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    registry.register(other)
    p = plan("quantize", expected.params, (4, 8), dtype)
    assert p.allocates == f"backend {name} computes in temporary tensors"
    assert other.calls == 0
    assert_same_results(p.run(x), expected)
    assert other.calls == 1
