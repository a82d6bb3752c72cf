"""Linear layers on values of their weight: sums within their bound, for every scheme and shape."""

import itertools

import pytest
import torch
from tests.tensors import normal
from torch import nn

import zeropoint as zp
from zeropoint.errors import ShapeError
from zeropoint.models import quantize_model
from zeropoint.ops import library
from zeropoint.ops.registry import Op, Request, explain
from zeropoint.ops.threads import thread_limit

SCHEMES = (
    "int8:channel", "uint8:channel:asym", "int8:tensor", "int4:g32", "uint4:g32:asym", "int3:g8",
    "int2:channel", "float8_e4m3fn:channel", "float8_e5m2:tensor", "float8_e4m3fn:block16x32",
    "float6_e3m2fn:g32", "mxfp4", "mxfp8_e4m3", "nvfp4", "nf4", "mx9", "int4:g32:scale=float16",
    "int8:channel1",
)  # fmt: skip
ROWS, COLS, OUT = (1, 4, 7, 66), (1, 16, 37, 100, 300, 512), (1, 64, 100, 130)


def computed(x: torch.Tensor, q: zp.QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the operator's output."""
    return library.linear_values(x, q.data, list(q.params.stored), bias, str(q.scheme), q.dtype)


def refusal(q: zp.QuantizedTensor, dtype: torch.dtype | None = None) -> str | None:
    """Return why the kernels do not multiply float32 by a weight that was ``dtype``, or None."""
    reported = explain(
        Request(
            op=Op.LINEAR_VALUES,
            scheme=q.scheme,
            shape=q.shape,
            dtype=torch.float32,
            own_dtype=dtype or q.dtype,
            device=torch.device("cpu"),
        )
    )
    return reported.reasons.get("cpu")


def assert_near(found: torch.Tensor, x: torch.Tensor, q: zp.QuantizedTensor, bias: torch.Tensor) -> None:
    """Compare with sums in float64, within what roundings of float32 add up to."""
    values = q.dequantize(torch.float32).double()
    exact = x.double() @ values.t() + bias.double()
    steps = min(x.shape[1], 256) + -(-x.shape[1] // 256) + 1
    bound = steps * 2.0**-24 * (x.double().abs() @ values.abs().t() + bias.double().abs())
    assert found.dtype == torch.float32
    assert bool(((found - exact).abs() <= bound).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sums_are_within_their_bound_for_every_remainder(scheme: str) -> None:
    for cols, out in itertools.product(COLS, OUT):
        q, bias = zp.quantize(normal(out, cols, seed=out), scheme), normal(out, 2, seed=cols)[:, 0]
        assert refusal(q) is None, scheme
        for rows in ROWS:
            x = normal(rows, cols, seed=rows)
            assert_near(computed(x, q, bias), x, q, bias)
            assert_near(computed(x, q), x, q, torch.zeros(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_any_dtype_have_float32_values(dtype: torch.dtype) -> None:
    q, x = zp.quantize(normal(70, 96, seed=0).to(dtype), "int4:g32"), normal(5, 96, seed=1)
    assert refusal(q) is None
    assert_near(computed(x, q), x, q, torch.zeros(70))


@pytest.mark.parametrize("scheme", ["int8:channel", "mxfp4", "uint4:g32:asym"])
def test_neither_threads_nor_other_rows_nor_strides_change_a_bit(scheme: str) -> None:
    q, x, bias = (
        zp.quantize(normal(300, 320, seed=0), scheme),
        normal(131, 320, seed=1),
        normal(1, 300, seed=2)[0],
    )
    with thread_limit(1):
        alone = computed(x, q, bias)
    for threads in (2, 3, 7):
        with thread_limit(threads):
            assert torch.equal(computed(x, q, bias), alone)
    for rows in (1, 2, 5, 64, 130):
        assert torch.equal(computed(x[-rows:], q, bias), alone[-rows:]), rows
    assert torch.equal(computed(x.t().contiguous().t(), q, bias), alone)
    assert torch.equal(computed(x.reshape(1, 131, 320), q, bias), alone.reshape(1, 131, 300))


def test_sums_of_whole_numbers_are_exact() -> None:
    codes = torch.randint(-128, 128, (130, 700), generator=torch.Generator().manual_seed(0))
    codes[:, 0] = -128
    q = zp.quantize(codes.float(), zp.QuantizationParams.new(1.0))
    x = torch.randint(-9, 10, (70, 700), generator=torch.Generator().manual_seed(1))
    assert torch.equal(q.codes.long(), codes)
    assert torch.equal(computed(x.float(), q).long(), x @ codes.t())


def test_nothing_comes_of_nothing() -> None:
    q, bias = zp.quantize(normal(20, 32, seed=0), "mxfp4"), torch.ones(20)
    assert computed(torch.zeros(0, 32), q, bias).shape == (0, 20)
    assert torch.equal(computed(torch.zeros(3, 32), q, bias), torch.ones(3, 20))
    nothing = zp.quantize(torch.zeros(20, 0), "int8:channel")
    assert refusal(nothing) == "there is nothing to multiply"
    assert torch.equal(computed(torch.zeros(3, 0), nothing, bias), torch.ones(3, 20))


def test_what_is_not_finite_stays_in_its_row() -> None:
    q, x = zp.quantize(normal(20, 64, seed=0), "int8:channel"), normal(6, 64, seed=1)
    expected = computed(x, q)
    x[2, 5], x[4, 0] = torch.nan, torch.inf
    found = computed(x, q)
    assert bool(found[2].isnan().all())
    assert not bool(found[4].isfinite().any())
    kept = [0, 1, 3, 5]
    assert torch.equal(found[kept], expected[kept])


def test_subnormal_numbers_survive_a_thread_that_flushes_them() -> None:
    q, x = zp.quantize(normal(20, 64, seed=0) * 2.0**-6, "int8:channel"), normal(6, 64, seed=1) * 2.0**-120
    expected = computed(x, q)
    assert bool(((expected.abs() < 2.0**-126) & (expected != 0)).any())
    try:
        assert torch.set_flush_denormal(True)
        found = computed(x, q)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_other_inputs_are_multiplied_by_the_whole_weight() -> None:
    q, x = zp.quantize(normal(20, 64, seed=0), "float8_e4m3fn:channel"), normal(6, 64, seed=1)
    values = q.dequantize(torch.float64)
    found = computed(x.double(), q)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, x.double() @ values.t())
    with zp.only_backend("reference"):
        torch.testing.assert_close(computed(x, q), found.float())
    half = computed(x.bfloat16(), q)
    assert half.dtype == torch.bfloat16
    # Values, inputs and results of 8 bits, sums of 64 products in float32.
    torch.testing.assert_close(half.double(), found, rtol=0.02, atol=0.05)


def test_why_there_is_no_kernel() -> None:
    q = zp.quantize(torch.ones(4, 32), "int8:channel")
    assert refusal(q, torch.float64) == "torch.float64 is computed in float64"
    assert (
        refusal(zp.quantize(torch.ones(4, 32), "int16:channel")) == "codes of 16 bits are wider than a byte"
    )
    assert refusal(q) is None


def test_tensors_that_are_too_short_are_refused_before_they_are_read() -> None:
    q, x = zp.quantize(normal(20, 64, seed=0), "int8:channel"), normal(6, 64, seed=1)
    with pytest.raises(
        ShapeError, match=r"^weight \(.* of shape \(20, 64\)\) must be bytes that hold 80 codes"
    ):
        computed(normal(6, 80, seed=1), q)
    with pytest.raises(ShapeError, match=r"^scales and zero points \(of shape \(19, 1\)\) must hold 20"):
        library.linear_values(x, q.data, [q.scales[0][1:]], None, str(q.scheme), q.dtype)
    with pytest.raises(ShapeError, match=r"^bias \(shape \(19,\)\) must have shape \(20,\)"):
        computed(x, q, torch.zeros(19))


def test_the_operator_passes_torchs_own_checks() -> None:
    q = zp.quantize(normal(20, 64, seed=0), "int4:g32")
    args = normal(3, 64, seed=1), q.data, list(q.scales), torch.zeros(20), str(q.scheme), q.dtype
    found = torch.library.opcheck(
        torch.ops.zeropoint.linear_values.default, args, test_utils=("test_schema", "test_faketensor")
    )
    assert found == {"test_schema": "SUCCESS", "test_faketensor": "SUCCESS"}


@pytest.mark.parametrize("preset", ["fp8_dynamic", "w8a16", "mxfp4_mxfp8"])
def test_layers_take_it_alone_compiled_and_exported(preset: str) -> None:
    torch.manual_seed(0)
    layer, x = quantize_model(nn.Sequential(nn.Linear(64, 48)), preset).model, torch.randn(40, 64)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
        rows = {"input": {0: torch.export.Dim("rows", min=2, max=99)}}
        program = torch.export.export(layer, (x,), dynamic_shapes=rows)
        called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert "zeropoint.linear_values.default" in called
        assert torch.equal(program.module()(x), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("preset", ["w8a8", "w8a16", "fp8_dynamic"])
def test_a_traced_layer_computes_from_what_it_is_given(preset: str) -> None:
    """torch.jit.trace would otherwise keep the result for the example."""
    torch.manual_seed(0)
    layer, x, y = quantize_model(nn.Sequential(nn.Linear(64, 48)), preset).model, *torch.randn(2, 40, 64)
    with torch.no_grad():
        with pytest.warns(DeprecationWarning, match=r"torch.jit.trace"):
            traced = torch.jit.trace(layer, x)
        assert torch.equal(traced(y), layer(y))


def test_gradients_reach_the_input() -> None:
    layer = quantize_model(nn.Sequential(nn.Linear(64, 48)), "w8a16").model
    x = torch.randn(40, 64, requires_grad=True)
    layer(x).sum().backward()
    values = layer[0].weight.quantized().dequantize()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, values.sum(0).expand(40, 64), rtol=1e-5, atol=1e-6)
