"""What models go through besides steps: processes, pickles, second conversions, hooks, joins."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import trained_apart
from tests.processes import run_two
from torch import nn

import zeropoint as zp
from zeropoint.errors import UnsupportedError
from zeropoint.models import (
    Add,
    Concatenate,
    Multiply,
    QuantizedEmbedding,
    QuantizedLinear,
    calibrate,
    convert,
    prepare,
    quantize_model,
)
from zeropoint.recipes import Assignment, Recipe, Rule


@pytest.mark.slow
def test_two_processes_train_what_one_trains_on_the_same_data(tmp_path: Path) -> None:
    """Also where the processes began with other weights."""
    run_two(trained_apart.run_process, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = trained_apart.prepared(seed=0)
    start = {key: value.clone() for key, value in alone.state_dict().items()}
    trained_apart.train(alone, slice(None))
    for key, value in alone.state_dict().items():
        assert torch.equal(first[key], second[key]), key
        # Sums of gradients in another order, over three steps.
        torch.testing.assert_close(first[key], value, rtol=1e-10, atol=1e-12, msg=key)
    moved = [key for key, value in alone.state_dict().items() if not torch.equal(value, start[key])]
    assert sum(key.endswith("scale") for key in moved) == 4 + 5 + 1
    conversion = convert(alone)
    x = trained_apart.images()[0]
    assert torch.equal(conversion.model(x.clone().requires_grad_()), alone(x))


@pytest.mark.parametrize("qat", ["minmax", "lsq"])
def test_prepared_models_are_pickled(qat: str) -> None:
    model = prepare(nn.Sequential(nn.Linear(8, 4), nn.GRU(4, 3)), "w8a16", qat=qat)
    other, x = pickle.loads(pickle.dumps(model)), torch.randn(2, 8)
    assert torch.equal(other(x)[0], model(x)[0])
    assert str(convert(other)) == str(convert(model))


def test_a_model_is_quantized_in_two_steps_and_each_layer_once() -> None:
    model = nn.Sequential(nn.Embedding(9, 16), nn.ModuleList([nn.Linear(16, 4)])[0], nn.Linear(4, 4))
    model.append(model[2])
    table = Recipe(rules=(Rule(types=("Embedding",), gives=Assignment.of(weight="int8:token")),))
    first = quantize_model(model, table)
    second = quantize_model(first.model, "w8a16")
    assert [layer.name for layer in second.layers] == ["1", "2"]
    assert isinstance(second.model[0], QuantizedEmbedding)
    assert isinstance(second.model[3], QuantizedLinear)
    assert second.model[3] is second.model[2]
    with pytest.raises(UnsupportedError, match="is quantized already"):
        quantize_model(second.model, "w8a16")


def test_a_rule_for_what_cannot_be_quantized_names_its_path() -> None:
    model = nn.ModuleDict({"block": nn.Sequential(nn.LayerNorm(4))})
    recipe = Recipe(rules=(Rule(types=("LayerNorm",), gives=Assignment.of(weight="int8")),))
    with pytest.raises(UnsupportedError, match=r"^layer block\.0: LayerNorm has no weight to quantize; give"):
        quantize_model(model, recipe)


def test_a_layer_with_hooks_is_kept_and_says_why() -> None:
    """What a hook does, such as weight normalization of old, would be lost without a word."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = nn.utils.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(normed, nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda *call: call[-1] + 1)
    reported = quantize_model(model, "w8a16", inplace=True).layers
    reason = "it has hooks, which would be lost; remove them first"
    assert [layer.reason for layer in reported] == [reason, reason, ""]


def test_the_summary_counts_each_weight_once() -> None:
    model = nn.ModuleList([nn.Embedding(4, 8), nn.Linear(8, 4), nn.LayerNorm(8), nn.Linear(8, 8)])
    model[1].weight = model[0].weight
    conversion = quantize_model(model, Recipe(rules=(Rule(name="3", gives=Assignment.of(weight="int8")),)))
    assert [layer.nbytes for layer in conversion.layers] == [(128, 128), (0, 0), (0, 0), (256, 68)]
    assert conversion.nbytes == (384, 196)
    given = Recipe(rules=(Rule(name="3", gives=Assignment.of(input="int8:token")),))
    assert quantize_model(model, given).layers[3].nbytes == (256, 256)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.add, self.multiply, self.join = Add(), Multiply(), Concatenate(dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.left(x), self.right(x)
        result: torch.Tensor = self.join(self.add(a, b), self.multiply(a, b))
        return result


def test_sums_products_and_concatenations_are_quantized_where_rules_name_them() -> None:
    torch.manual_seed(0)
    model, x = Joined(), torch.randn(5, 6)
    rules = (
        Rule(
            types=("Add",), gives=Assignment.of(input="int8:tensor static", output="uint8:tensor:asym static")
        ),
        Rule(types=("Multiply",), gives=Assignment.of(output="int8:tensor dynamic")),
        Rule(types=("Concatenate",), gives=Assignment.of(input="int4:tensor static")),
    )
    calibration = calibrate(model, Recipe(rules=rules), [x])
    a, b = model.left(x), model.right(x)
    params = calibration.params
    terms = torch.cat([a, b])
    assert torch.equal(params["add.input"].scales[0], zp.choose_params(terms, "int8").scales[0].reshape(-1))
    total = zp.fake_quantize(
        zp.fake_quantize(a, params["add.input"]) + zp.fake_quantize(b, params["add.input"]),
        params["add.output"],
    )
    product = zp.fake_quantize(a * b, "int8")
    parts = [zp.fake_quantize(part, params["join.input"]) for part in (total, product)]
    prepared = prepare(model, Recipe(rules=rules), calibration=calibration)
    assert torch.equal(prepared(x), torch.cat(parts, -1))
    conversion = convert(prepared)
    assert torch.equal(conversion.model(x), torch.cat(parts, -1))
    assert [layer.type for layer in conversion.layers] == [
        "Linear",
        "Linear",
        "Add",
        "Multiply",
        "Concatenate",
    ]


def test_joins_compute_what_torch_computes() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(Add()(a, b), a + b)
    assert torch.equal(Multiply()(a, b), a * b)
    assert torch.equal(Concatenate(1)(a, b, a), torch.cat([a, b, a], 1))
    assert repr(Concatenate(1)) == "Concatenate(dim=1)"


def test_the_original_of_a_copy_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.LSTM(4, 3))
    before = copy.deepcopy(model.state_dict())
    recipe = Recipe(
        default=Rule(gives=None), rules=(Rule(types=("LSTM", "Linear"), gives=Assignment.of(weight="int4")),)
    )
    for result in (quantize_model(model, recipe).model, prepare(model, recipe)):
        x = torch.randn(2, 8)
        assert not torch.equal(result(x)[0], model(x)[0])
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_memory_of_recurrent_and_convolutional_weights_really_drops() -> None:
    def held(model: nn.Module) -> int:
        return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))

    for layer, share in (
        (nn.LSTM(256, 256), 0.27),
        (nn.Conv2d(64, 64, 3), 0.27),
        (nn.GRUCell(256, 256), 0.27),
    ):
        recipe = Recipe(default=Rule(gives=None), rules=(Rule(gives=Assignment.of(weight="int8:channel")),))
        new = quantize_model(layer, recipe).model
        assert held(new) < share * held(layer)
        assert not any(
            tensor.ndim > 1 for tensor in _tensors(new) if tensor.is_floating_point() and tensor.shape[-1] > 1
        )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return every tensor that a module holds, in whatever attribute."""
    found: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    flat = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return [*model.parameters(), *model.buffers(), *(item for item in flat if isinstance(item, torch.Tensor))]
