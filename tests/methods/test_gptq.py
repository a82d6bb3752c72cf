"""GPTQ and what may stand before it: against the textbook's loop, on edges, and in its spelling."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.functional import quantize
from zeropoint.methods import LayerData, Samples, method_named
from zeropoint.methods.factored import DAMPING, factored
from zeropoint.methods.rounding_grid import grid_of
from zeropoint.ops.feedback import feed_back, output_errors
from zeropoint.schemes import Scheme
from zeropoint.stats import CrossGram, GramMatrix, MeanSquare, Statistics

SCHEMES = (
    "int4:g32", "int3:g32", "int2:g32", "uint4:g32:asym", "int8:channel", "int4:tensor", "int4:block16x16",
    "nf4:g32", "nvfp4", "mxfp4", "mxfp6_e2m3", "mx6", "bfp16", "float8_e4m3fn:channel", "ternary:g64",
    "amdfp4", "nf4_double", "q4_0", "q4_k", "q2_k", "q6_k", "iq4_nl", "int4:g48",
)  # fmt: skip


def inputs(tokens: int = 1024, columns: int = 256, seed: int = 0) -> torch.Tensor:
    """Correlated vectors, whose columns differ in size."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=draw) * torch.logspace(0, -2, columns)
    return torch.randn(tokens, columns, generator=draw) @ mix


def weights(rows: int = 48, columns: int = 256) -> torch.Tensor:
    """A weight whose numbers are those of a normal distribution."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.05


def seen(x: torch.Tensor) -> LayerData:
    """The Gram matrix of inputs, as methods take it."""
    gram = GramMatrix(features=x.shape[1])
    state = gram.update(gram.start(), x)
    return LayerData(statistics={"gram": Statistics(accumulator=gram, state=state)})


def loss(weight: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> float:
    """Squared error of the outputs over their squares."""
    wide = x.double()
    wrong, whole = (values.double() - weight.double()) @ wide.T, weight.double() @ wide.T
    return float(wrong.square().sum() / whole.square().sum())


def textbook(weight: np.ndarray, scale: np.ndarray, gram: np.ndarray, group: int) -> np.ndarray:
    """GPTQ as published: a Cholesky factor of the inverse, one column after the other, in static order."""
    order = np.argsort(-gram.diagonal(), kind="stable")
    damped = gram + DAMPING * gram.diagonal().mean() * np.eye(len(gram))
    upper = np.linalg.cholesky(np.linalg.inv(damped[order][:, order])).T
    w, q = weight[:, order].copy(), np.empty_like(weight)
    for j, column in enumerate(order):
        s = scale[:, column // group]
        q[:, column] = np.clip(np.rint(w[:, j] / s), -8, 7) * s
        error = (w[:, j] - q[:, column]) / upper[j, j]
        w[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
    return q


def test_codes_are_those_of_the_textbook() -> None:
    x, weight = inputs(), weights()
    data = seen(x)
    found = method_named("gptq").quantize(weight, Scheme.parse("int4:g64"), data).q
    state = data.statistics["gram"]
    gram = (state["gram"] / int(state["vectors"])).numpy()
    scale = found.scales[0].double().numpy().reshape(len(weight), -1)
    expected = textbook(weight.double().numpy(), scale, gram, 64)
    values = found.dequantize().double().numpy()
    # A number in the middle of two codes may go either way, and takes the rest of its row with it.
    assert (np.abs(values - expected).max(1) < 1e-6).mean() > 0.95


def test_outputs_are_closer_than_those_of_the_nearest_codes_under_any_scheme() -> None:
    x, weight = inputs(), weights()

    def one(scheme: str) -> str | None:
        near, fed, swept = (
            loss(weight, zp.quantize(weight, scheme, method=method, inputs=given).dequantize(), x)
            for method, given in (("nearest", None), ("gptq", x), ("descent", x))
        )
        return None if fed < 0.7 * near and swept <= fed * 1.001 else f"{near:.3g} {fed:.3g} {swept:.3g}"

    assert {scheme: found for scheme in SCHEMES if (found := one(scheme)) is not None} == {}


def test_codes_of_narrow_weights_keep_their_dtype_and_scales() -> None:
    q = zp.quantize(weights().bfloat16(), "int4:g64:scale=input", method="gptq", inputs=inputs())
    assert (q.dtype, q.scales[0].dtype) == (torch.bfloat16, torch.bfloat16)
    near = zp.quantize(weights().bfloat16(), "int4:g64:scale=input")
    own = loss(weights().bfloat16(), q.dequantize(), inputs())
    assert own < 0.7 * loss(weights().bfloat16(), near.dequantize(), inputs())


@pytest.mark.parametrize(
    ("what", "x"),
    [
        ("one vector", inputs(1)),
        ("fewer vectors than columns", inputs(40)),
        ("columns that are always zero", inputs() * (torch.arange(256) % 3 > 0)),
        ("nothing but zeros", torch.zeros(64, 256)),
        ("one vector again and again", inputs(1).expand(512, 256)),
        ("outliers of 1e4", inputs() * torch.where(torch.arange(256) == 7, 1e4, 1.0)),
        ("small numbers", inputs() * 1e-12),
        ("large numbers", inputs() * 1e15),
    ],
)
def test_any_inputs_give_finite_codes(what: str, x: torch.Tensor) -> None:
    weight = weights()
    q = zp.quantize(weight, "int4:g64", method="gptq", inputs=x)
    assert bool(torch.isfinite(q.dequantize()).all()), what
    if bool(x.any()):
        near = zp.quantize(weight, "int4:g64")
        assert loss(weight, q.dequantize(), x) <= loss(weight, near.dequantize(), x) * 1.001, what


def test_vectors_with_nan_are_left_out() -> None:
    x = inputs()
    spoiled = torch.cat([x[:512], torch.full((1, 256), math.nan), x[512:]])
    same = zp.quantize(weights(), "int4:g64", method="gptq", inputs=x)
    assert torch.equal(zp.quantize(weights(), "int4:g64", method="gptq", inputs=spoiled).data, same.data)


def test_a_shift_makes_up_for_inputs_that_have_changed() -> None:
    x, weight = inputs(2048), weights()
    mixed = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * 0.01
    changed = x + x @ mixed
    data = pairs(x[:1536], changed[:1536], Samples(inputs=changed[1536:], floats=x[1536:]))
    found = {}
    for method in ("gptq", "shift+gptq", "shift+descent"):
        result = method_named(method).quantize(weight, Scheme.parse("int4:g64"), data)
        error = x[1536:] @ weight.T - changed[1536:] @ result.q.dequantize().T
        found[method] = float(error.square().sum())
    assert found["shift+gptq"] < 0.9 * found["gptq"]
    assert found["shift+descent"] < 0.9 * found["gptq"]


def pairs(floats: torch.Tensor, changed: torch.Tensor, held_out: Samples | None) -> LayerData:
    """What is known of inputs in the float model and in the quantized one."""
    gram, cross = GramMatrix(features=floats.shape[1]), CrossGram(features=floats.shape[1])
    return LayerData(
        statistics={
            "gram": Statistics(accumulator=gram, state=gram.update(gram.start(), changed)),
            "cross_gram": Statistics(accumulator=cross, state=cross.measure_pair(floats, changed)),
        },
        held_out=held_out,
    )


def test_nothing_shifts_where_inputs_have_not_changed() -> None:
    x, weight = inputs(), weights()
    data = pairs(x, x, Samples(inputs=x[:64], floats=x[:64]))
    shifted = method_named("shift+gptq").quantize(weight, Scheme.parse("int4:g64"), data)
    assert shifted.notes == ("shift strength 0",)
    assert torch.equal(
        shifted.q.data, method_named("gptq").quantize(weight, Scheme.parse("int4:g64"), data).q.data
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shift+shift+gptq", r"write shift\+gptq"),
        ("shift+mse", "steps end with gptq or descent or adaround"),
        ("gptq+shift", "did you mean gptq"),
    ],
)
def test_a_chain_in_another_order_is_refused(text: str, words: str) -> None:
    with pytest.raises(zp.RecipeError, match=words):
        method_named(text)


def test_what_cannot_be_solved_is_refused_with_what_to_do() -> None:
    with pytest.raises(zp.UnsupportedError, match=r"rounds one weight at a time.*use method mse"):
        zp.quantize(weights(), "if4", method="gptq", inputs=inputs())
    with pytest.raises(zp.CalibrationError, match="needs the gram of inputs"):
        zp.quantize(weights(), "int4:g64", method="gptq")
    with pytest.raises(zp.CalibrationError, match="inputs of the float and of the quantized model"):
        method_named("shift+gptq").quantize(weights(), Scheme.parse("int4:g64"), seen(inputs()))


def test_after_a_shift_scales_heed_what_later_columns_make_up_for() -> None:
    draw, weight = torch.Generator().manual_seed(5), weights()
    common = torch.randn(1024, 16, generator=draw) @ torch.randn(16, 256, generator=draw)
    x = common * torch.logspace(-1, 1, 256).flip(0)[torch.randperm(256, generator=draw)]
    x = x + torch.randn(1024, 256, generator=draw)
    data = seen(x)
    whole = factored(data.statistics["gram"])
    gram = data.statistics["gram"]["gram"] / int(data.statistics["gram"]["vectors"])
    square = MeanSquare(features=256)
    count = {name: torch.tensor(1, dtype=torch.int64) for name in ("vectors", "seen", "left_out")}
    known = LayerData(
        statistics={
            "mean_square": Statistics(accumulator=square, state={"squares": gram.diagonal().clone(), **count})
        }
    )
    scheme = Scheme.parse("int3:g32:scale=float32")
    params = method_named("mse_weighted").quantize(weight, scheme, known).q.params
    plain, _ = feed_back(weight, whole.upper, whole.pivots, whole.order, grid_of(params))
    alone = method_named("gptq").quantize(weight, scheme, data).q.dequantize()
    assert torch.equal(alone, plain)
    cross = CrossGram(features=256)
    same = Statistics(accumulator=cross, state=cross.measure_pair(x, x))
    shifted = replace(data, statistics={**data.statistics, "cross_gram": same})
    own = method_named("shift+gptq").quantize(weight, scheme, shifted).q.dequantize()
    assert loss(weight, own, x) < 0.95 * loss(weight, plain, x)


def test_inputs_that_are_always_zero_have_no_say_in_scales() -> None:
    data = seen(inputs() * (torch.arange(256) % 3 > 0))
    assert bool((factored(data.statistics["gram"]).costs[::3] == 0).all())


@pytest.mark.parametrize("scheme", ["int4:g64", "uint3:g64:asym", "nf4:g64", "int2:g64"])
def test_soft_rounding_is_close_to_feedback_and_no_row_is_behind_nearest_codes(scheme: str) -> None:
    x, weight = inputs(), weights()
    whole = factored(seen(x).statistics["gram"])
    q = zp.quantize(weight, scheme, method="adaround", inputs=x)
    near = quantize(weight, q.params).dequantize()
    factors = whole.upper, whole.pivots, whole.order
    soft, nearest = (output_errors(weight, v, *factors) for v in (q.dequantize(), near))
    assert bool((soft <= nearest).all())
    assert float(soft.sum()) < 0.8 * float(nearest.sum())
    levels = (q.dequantize() - weight).abs() / q.scales[0].repeat_interleave(64, 1)
    if scheme.startswith("int"):
        inside = (weight / q.scales[0].repeat_interleave(64, 1)).abs() < 2 ** (int(scheme[3]) - 1) - 1
        assert float(levels[inside].max()) < 1.001  # one of the values on either side
