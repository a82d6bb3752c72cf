"""The bound of errors of outputs: against the definition, and against damage."""

from dataclasses import replace

import pytest
import torch

from zeropoint.functional import quantize
from zeropoint.methods import Bound, LayerData, method_named
from zeropoint.methods.factored import factored
from zeropoint.methods.output_bound import output_error, proven
from zeropoint.methods.rounding_grid import grid_of
from zeropoint.ops.feedback import feed_back, output_errors
from zeropoint.schemes import Scheme
from zeropoint.stats import GramMatrix, Statistics
from zeropoint.tensor import QuantizedTensor


def _data() -> tuple[torch.Tensor, Statistics]:
    draw = torch.Generator().manual_seed(0)
    mix = torch.randn(128, 128, generator=draw) * torch.logspace(0, -2, 128)
    x = torch.randn(512, 128, generator=draw) @ mix
    gram = GramMatrix(features=128)
    return torch.randn(32, 128, generator=draw) * 0.05, Statistics(
        accumulator=gram, state=gram.update(gram.start(), x)
    )


@pytest.mark.parametrize("scheme", ["int4:g32", "uint4:g32:asym", "nf4:g32", "nvfp4", "q4_0", "int8:channel"])
@pytest.mark.parametrize("method", ["gptq", "descent"])
def test_the_error_is_that_of_the_damped_matrix_and_within_its_bound(method: str, scheme: str) -> None:
    weight, gram = _data()
    result = method_named(method).quantize(weight, Scheme.parse(scheme), LayerData(statistics={"gram": gram}))
    h = factored(gram).damped
    e, wide = result.q.dequantize().double() - weight.double(), weight.double()
    expected = float(((e @ h) * e).sum() / ((wide @ h) * wide).sum())
    outputs = result.outputs
    assert outputs is not None
    assert outputs.loss == pytest.approx(expected, rel=1e-6)
    assert outputs.loss < outputs.bound
    again, wrong = proven(weight, result.q, gram)
    assert wrong == ()
    assert (again.loss, again.bound) == (pytest.approx(outputs.loss), pytest.approx(outputs.bound))
    assert again.statistics == outputs.statistics
    on_statistics = gram["gram"] / int(gram["vectors"])
    assert float(((e @ on_statistics) * e).sum()) <= float(((e @ h) * e).sum())


def test_the_bound_is_met_by_weights_in_the_middle_of_two_values() -> None:
    gram = GramMatrix(features=2)
    state = gram.update(gram.start(), torch.eye(2))
    seen = Statistics(accumulator=gram, state=state)
    weight = torch.tensor([[7.0, 0.5]])
    found = method_named("nearest").quantize(weight, Scheme.parse("int4:tensor:scale=float32")).q
    half = float(found.scales[0]) / 2
    values = weight + torch.tensor([[half, -half]])
    whole = factored(seen)
    losses = output_errors(weight, values, whole.upper, whole.pivots, whole.order)
    error = output_error(weight, losses, seen, grid_of(found.params))
    assert error.loss == pytest.approx(error.bound)
    assert error.over == 0


def test_rows_in_which_nothing_clips_are_within_their_bound_whatever_the_scales() -> None:
    weight, gram = _data()
    wide = method_named("nearest").quantize(weight * 4, Scheme.parse("int4:g32:scale=float32")).q.params
    whole = factored(gram)
    _, losses = feed_back(weight, whole.upper, whole.pivots, whole.order, grid_of(wide))
    assert output_error(weight, losses, gram, grid_of(wide)).over == 0


def test_a_changed_code_is_found() -> None:
    weight, gram = _data()
    q = (
        method_named("gptq")
        .quantize(weight, Scheme.parse("int4:g32"), LayerData(statistics={"gram": gram}))
        .q
    )
    codes = q.codes.clone()
    codes[5] = -codes[5].clamp_min(-7)
    values = (codes * q.scales[0].float().repeat_interleave(32, 1)).float()
    damaged: QuantizedTensor = replace(q, data=quantize(values, q.params).data)
    assert proven(weight, damaged, gram)[1] == (5,)


def test_chains_and_soft_rounding_have_no_bound_of_the_weight() -> None:
    kinds = {
        name: method_named(name).bound(Scheme.parse("int4:g64"))
        for name in ("gptq", "descent", "adaround", "shift+gptq")
    }
    assert kinds == {
        "gptq": Bound.OUTPUT, "descent": Bound.OUTPUT, "adaround": Bound.NONE, "shift+gptq": Bound.NONE,
    }  # fmt: skip
