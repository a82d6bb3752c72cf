"""Least squared error weighted by the mean square of inputs: what is minimized, and where it is refused."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.errors import CalibrationError, UnsupportedError
from zeropoint.layout.blocks import pairwise_sums
from zeropoint.methods import LayerData, method_named
from zeropoint.models import calibrate, quantize_model
from zeropoint.recipes import Assignment, Recipe, Rule
from zeropoint.schemes import Scheme
from zeropoint.stats import GramMatrix, MeanSquare, Statistics

WEIGHTED, MSE, NEAREST = (method_named(name) for name in ("mse_weighted", "mse", "nearest"))
SCHEMES = (
    "int4:g32", "int2:g16", "uint4:g32:asym", "int4:g32:asym=real", "mxfp4", "nvfp4", "int4:channel",
    "int4:g32:scale=signed/float32",
)  # fmt: skip


def inputs(columns: int = 96, *, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, columns, generator=generator) * torch.randn(columns, generator=generator).exp()


def given(x: torch.Tensor) -> LayerData:
    square = MeanSquare(features=x.shape[-1])
    return LayerData(
        statistics={"mean_square": Statistics(accumulator=square, state=square.update(square.start(), x))}
    )


def weight(*, seed: int = 5) -> torch.Tensor:
    return torch.randn(24, 96, generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("text", SCHEMES)
def test_no_block_has_a_larger_weighted_error_than_under_nearest_and_the_sum_is_below_mse(text: str) -> None:
    scheme, w, x = Scheme.parse(text), weight(), inputs()
    importance = x.double().square().mean(0)
    errors = []
    for method in (WEIGHTED, MSE, NEAREST):
        q = method.quantize(w, scheme, given(x)).q
        left = (q.dequantize().double() - w.double()).square()
        errors.append(pairwise_sums(left * importance, scheme.granularity))
    assert bool((errors[0] <= errors[2] * (1 + 1e-9)).all())
    assert all(float(a.sum()) < float(b.sum()) for a, b in pairwise(errors))


# Of eight bits, steps of 4 % leave little of the squares and much of the error.
@pytest.mark.parametrize(("text", "slack"), [
    ("int4:g32", 1.002), ("int3:g16", 1.002), ("nf4:g32", 1.002), ("e2m3:g32:scale=float32", 1.15),
    ("int8:g48", 1.15),
])  # fmt: skip
def test_a_dense_sweep_of_scales_finds_little_more(text: str, slack: float) -> None:
    scheme, w, x = Scheme.parse(text), weight(), inputs()
    size, importance = scheme.granularity.block_shape((24, 96))[1], x.double().square().mean(0)
    start = NEAREST.quantize(w, scheme).q.params
    blocks, weights = w.double().reshape(24, -1, size), importance.reshape(1, -1, size)
    least = torch.full(blocks.shape[:2], torch.inf, dtype=torch.float64)
    for factor in torch.linspace(-3.0, 1.5, 700).exp2().tolist():
        params = replace(start, scales=(start.scales[0] * factor,))
        values = zp.quantize(w, params).dequantize(torch.float64).reshape(blocks.shape)
        least = torch.minimum(least, ((values - blocks).square() * weights).sum(-1))
    values = WEIGHTED.quantize(w, scheme, given(x)).q.dequantize(torch.float64).reshape(blocks.shape)
    found, squares = (((v - u).square() * weights).sum(-1) for v, u in ((values, blocks), (blocks, 0.0)))
    assert bool((found <= least + 0.0005 * squares).all())
    assert float(found.sum()) <= slack * float(least.sum())


def test_columns_of_equal_importance_give_the_codes_of_mse() -> None:
    scheme = Scheme.parse("uint4:g32:asym")
    q = WEIGHTED.quantize(weight(), scheme, given(torch.full((3, 96), 2.0))).q
    plain = MSE.quantize(weight(), scheme).q
    assert torch.equal(q.data, plain.data)
    assert torch.equal(q.scales[0], plain.scales[0])


def test_blocks_whose_inputs_are_zero_stay_as_under_nearest() -> None:
    scheme, w = Scheme.parse("int4:g32:asym=real"), weight()
    q = WEIGHTED.quantize(w, scheme, given(torch.zeros(3, 96))).q
    assert torch.equal(q.data, NEAREST.quantize(w, scheme).q.data)


def test_a_model_whose_inputs_differ_in_size_gets_outputs_of_smaller_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))
    data, unseen = [inputs(seed=3), inputs(seed=3) * 0.5], inputs(seed=3).flip(0) * 1.5
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int3:g32", method="mse_weighted")))
    found = quantize_model(model, recipe, calibration=calibrate(model, recipe, data))
    others = [quantize_model(model, "int3:g32", method=name) for name in ("mse", "nearest")]
    with torch.no_grad():
        off = [float((c.model(unseen) - model(unseen)).square().sum()) for c in (found, *others)]
    assert off[0] < 0.95 * off[1] < off[2]
    assert "method mse_weighted" in str(found.layers[0])


def test_statistics_that_are_missing_or_of_another_layer_are_named() -> None:
    scheme = Scheme.parse("int4:g32")
    gram = GramMatrix(features=96)
    wrong = LayerData(statistics={"mean_square": Statistics(accumulator=gram, state=gram.start())})
    for data in (LayerData(), wrong):
        with pytest.raises(CalibrationError, match="mse_weighted needs the mean_square of the layer's input"):
            WEIGHTED.quantize(weight(), scheme, data)
    for columns in (32, 128):
        with pytest.raises(
            CalibrationError, match=rf"is of {columns} inputs, and the weight has shape \(24, 96\)"
        ):
            WEIGHTED.quantize(weight(), scheme, given(inputs(columns)))
    with pytest.raises(CalibrationError, match="received no calibration data"):
        WEIGHTED.quantize(weight(), scheme, given(inputs()[:0]))
    with pytest.raises(UnsupportedError, match="method mse_weighted chooses scales, and bfloat16"):
        WEIGHTED.quantize(weight(), Scheme.parse("bfloat16:cast"), given(inputs()))
