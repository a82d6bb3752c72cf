"""Corrections of biases: the formula, where they stand in a chain, and models in memory."""

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.methods import LayerData, method_named
from zeropoint.methods.chain import spelled
from zeropoint.methods.method import SUMS
from zeropoint.schemes import Scheme
from zeropoint.stats import PairSums, Statistics


class Block(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=bias), nn.Linear(64, 32, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


def deep(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(bias=bias) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(32, 8, bias=False)).eval()


def vectors(seed: int, batches: int = 8) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 32, generator=draw) + torch.linspace(-1, 2, 32) for _ in range(batches)]


def test_the_mean_of_outputs_becomes_that_of_the_float_layer() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 32, generator=draw), torch.randn(500, 32, generator=draw) + 1
    changed = x + 0.3 * torch.rand(500, 32, generator=draw)
    sums = PairSums(features=32)
    whole = sums.update_pair(sums.start(), x, changed)
    data = LayerData(statistics={SUMS: Statistics(accumulator=sums, state=whole)})
    result = method_named("nearest+bias").quantize(weight, Scheme.parse("int3:g32"), data)
    values, added = result.dequantize(torch.float32), result.changes["bias"]
    missed = (x @ weight.T).mean(0) - (changed @ values.T).mean(0)
    assert float(missed.abs().mean()) > 0.1
    # Means are of numbers rounded to 12 bits.
    assert float((missed - added).abs().max()) < 3e-3
    assert result.notes == (f"bias by {float(added.square().mean().sqrt()):.2g}",)


def test_sums_of_parts_are_those_of_the_whole_and_leave_out_pairs_that_are_not_finite() -> None:
    x, near = torch.randn(2, 192, 8, generator=torch.Generator().manual_seed(1))
    sums = PairSums(features=8)
    whole = sums.measure_pair(x, near)
    parts = sums.update_pair(sums.measure_pair(x[:64], near[:64]), x[64:], near[64:])
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    broken = near.clone()
    broken[5, 2] = torch.inf
    found = sums.measure_pair(x, broken)
    assert (int(found["vectors"]), int(found["left_out"])) == (191, 8)
    rest = torch.arange(192) != 5
    assert torch.allclose(found["inputs"], near[rest].double().sum(0), atol=0.02)
    with pytest.raises(zp.UnsupportedError, match="PairSums measures pairs of inputs"):
        sums.measure(x)


@pytest.mark.parametrize("method", ["nearest", "shift+gptq"])
def test_a_model_comes_closer_on_vectors_that_nothing_was_learned_from(method: str) -> None:
    model, x = deep(), torch.cat(vectors(7))
    data = {method: None if method == "nearest" else vectors(1), f"{method}+bias": vectors(1)}
    with torch.no_grad():
        made = [
            zp.quantize_model(model, "int2:g32", method=name, calibration=given).model
            for name, given in data.items()
        ]
        errors = [float((found(x) - model(x)).square().mean()) for found in made]
    assert errors[1] < 0.95 * errors[0]


def test_the_codes_are_those_without_a_correction_in_the_first_layer_and_the_model_is_as_it_was() -> None:
    model = deep()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = zp.quantize_model(model, "int3:g32", method="gptq+bias", calibration=vectors(1)).model
    plain = zp.quantize_model(model, "int3:g32", method="gptq", calibration=vectors(1)).model
    assert torch.equal(made[0].up.weight.codes(0, 64).codes, plain[0].up.weight.codes(0, 64).codes)
    assert torch.equal(plain[0].up.bias, model[0].up.bias)
    assert not torch.equal(made[0].up.bias, model[0].up.bias)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_layers_without_a_bias_stay_as_they_are_and_some_layer_has_to_have_one() -> None:
    model = deep(bias=False)
    made = zp.quantize_model(model, "int3:g32", method="nearest+bias", calibration=vectors(1)).model
    assert made[0].up.bias is None
    assert made[2].bias is None
    assert not torch.equal(made[0].down.bias, model[0].down.bias)
    bare = nn.Sequential(nn.Linear(32, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    with pytest.raises(zp.UnsupportedError, match=r"corrects biases, and no layer .* use shift\+gptq$"):
        zp.quantize_model(bare, "int3:g16", method="shift+gptq+bias", calibration=vectors(1))


def test_a_correction_needs_both_streams() -> None:
    with pytest.raises(zp.CalibrationError, match="needs the pair_sums"):
        zp.quantize_model(deep(), "int3:g32", method="nearest+bias")
    with pytest.raises(zp.CalibrationError, match="needs the pair_sums of inputs"):
        zp.quantize(torch.randn(8, 32), "int3:g32", method="nearest+bias")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bias", r"'bias' follows a method; write gptq\+bias or nearest\+bias"),
        ("bias+gptq", r"bias stands last, since it takes up .*; write gptq\+bias"),
        ("shift+bias+gptq", r"write shift\+gptq\+bias"),
        ("shift+bias", r"'shift\+bias' names no method.* write shift\+gptq\+bias"),
        ("gptq+bias+bias", r"bias stands there twice; write gptq\+bias"),
        ("shift+nearest+bias", r"rounds by 'nearest'.*: shift\+gptq\+bias"),
        ("kmeans+bias", r"rounds by 'kmeans'"),
        ("shift+awq+gptq+bias", r"write awq\+shift\+gptq\+bias"),
    ],
)
def test_a_correction_in_another_place_is_an_error_that_says_how_it_is_written(text: str, says: str) -> None:
    with pytest.raises(zp.RecipeError, match=says):
        spelled(text)


@pytest.mark.parametrize(
    "text", ["nearest+bias", "mse+bias", "awq+shift+descent+bias", "smooth+nearest+bias"]
)
def test_a_chain_is_spelled_with_its_correction(text: str) -> None:
    assert method_named(text).name == text
