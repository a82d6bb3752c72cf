"""Rotated weights: codes of other methods, layers that rotate their inputs, and weights rotated back."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.oracles import synthetic_llama
from torch import nn

import zeropoint as zp
from zeropoint.errors import (
    NonFiniteError,
    RangeError,
    RecipeError,
    ShapeError,
    UnsupportedError,
    ZeropointError,
)
from zeropoint.methods import method_named
from zeropoint.models import QuantizedLinear, calibrate, quantize_model
from zeropoint.models.graph import quantize_graph
from zeropoint.ops.rotation import Rotation
from zeropoint.recipes import Assignment, Recipe, Rule
from zeropoint.schemes import Scheme


def heavy(rows: int = 64, columns: int = 256, seed: int = 0) -> torch.Tensor:
    """Return numbers of Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    normal, square = torch.randn(2, rows, columns, 3, generator=generator).unbind(0)
    return normal[..., 0] / square.square().mean(-1).sqrt()


def layers(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64, bias=bias), nn.ReLU(), nn.Linear(64, 8))
    model[0].weight.data = heavy(64, 96) / 10
    return model


@pytest.mark.parametrize(("spelled", "size", "inner"), [
    ("hadamard", 128, "nearest"), ("hadamard64", 64, "nearest"), ("hadamard32@7+mse", 32, "mse"),
    ("hadamard256+hqq", 256, "hqq"),
])  # fmt: skip
def test_codes_are_those_of_the_other_method_on_the_rotated_weight(
    spelled: str, size: int, inner: str
) -> None:
    weight, scheme = heavy(), Scheme.parse("uint4:g32:asym=real")
    rotation = Rotation(size=size, seed=7 if "@7" in spelled else 0)
    found = method_named(spelled).quantize(weight, scheme)
    plain = method_named(inner).quantize(rotation.rotate(weight), scheme)
    assert found.rotation == rotation
    assert torch.equal(found.q.data, plain.q.data)
    assert torch.equal(found.dequantize(), rotation.unrotate(plain.q.dequantize()))
    assert method_named(method_named(spelled).name) == method_named(spelled)
    assert method_named(spelled).name == spelled


@pytest.mark.parametrize(("scheme", "most"), [("int4:g128", 0.75), ("int3:g64", 0.85), ("mxfp4", 0.9)])
def test_heavy_tails_lose_less_once_they_are_rotated(scheme: str, most: float) -> None:
    weight = heavy(128, 512)
    plain, rotated = (
        method_named(name).quantize(weight, Scheme.parse(scheme)).report(weight).squared_error
        for name in ("nearest", "hadamard")
    )
    assert rotated < most * plain


def test_a_layer_rotates_its_input_and_computes_what_the_weight_rotated_back_computes() -> None:
    model, x = layers(), torch.randn(5, 3, 96)
    converted = quantize_model(model, "int8:g32", method="hadamard32@3")
    layer = converted.model[0]
    assert layer.explain().endswith(", of the input rotated by hadamard32@3")
    assert "rotated by hadamard32@3" in repr(layer)
    back = zp.dequantize_model(converted.model)
    assert type(back[0]) is nn.Linear
    with torch.no_grad():
        kept, plain = converted.model(x), model(x)
        assert torch.allclose(kept, back(x), rtol=1e-4, atol=1e-5)
        assert torch.allclose(kept, plain, atol=0.02 * float(plain.abs().max()))
        error = (back[0].weight - model[0].weight).norm() / model[0].weight.norm()
    assert converted.layers[0].error == pytest.approx(float(error), rel=1e-4)
    with torch.no_grad():
        half = copy.deepcopy(converted.model).half()(x.half())
    assert torch.allclose(half.float(), kept, atol=2e-2)


def test_an_input_is_rotated_before_it_is_quantized() -> None:
    recipe = Recipe(
        default=Rule(gives=Assignment.of(weight="int8:channel", input="int8:token", method="hadamard"))
    )
    model = nn.Sequential(nn.Linear(128, 16))
    x = torch.randn(64, 128)
    x[:, 5] *= 100
    with torch.no_grad():
        rotated, plain = (
            (quantize_model(model, r).model(x) - model(x)).norm() for r in (recipe, recipe_without(recipe))
        )
    assert rotated < plain


def recipe_without(recipe: Recipe) -> Recipe:
    gives = recipe.default.gives
    assert gives is not None
    return Recipe(default=Rule(gives=Assignment(weight=gives.weight, input=gives.input)))


def test_an_input_whose_range_was_calibrated_is_refused() -> None:
    recipe = Recipe(
        default=Rule(gives=Assignment.of(weight="int8:channel", input="int8:tensor", method="hadamard"))
    )
    model = nn.Sequential(nn.Linear(32, 16))
    with pytest.raises(UnsupportedError, match="layer 0: its input is rotated by hadamard32 before it is"):
        quantize_model(model, recipe, calibration=calibrate(model, recipe, [torch.randn(4, 32)]))


def test_a_state_keeps_the_rotation_and_fits_no_other(tmp_path: Path) -> None:
    x = torch.randn(4, 96)
    first = quantize_model(layers(), "int4:g32", method="hadamard").model
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    again = quantize_model(nn.Sequential(*map(fresh, layers())), "int4:g32", method="hadamard").model
    assert not torch.equal(again(x), first(x))
    again.load_state_dict(state)
    assert torch.equal(again(x), first(x))
    for method in ("hadamard@1", "nearest"):
        other = quantize_model(layers(), "int4:g32", method=method).model
        with pytest.raises(RuntimeError, match=r"rotation of the state \(hadamard32\) must be that of the"):
            other.load_state_dict(state)
    torch.save(first, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), first(x))


def fresh(layer: nn.Module) -> nn.Module:
    """Return a layer of the same sizes with other numbers."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, layer.out_features)
    return layer


def test_tables_and_convolutions_are_rotated_back_where_they_are_decoded() -> None:
    model = nn.ModuleList([nn.Embedding(20, 64), nn.Conv1d(8, 4, 3), nn.Linear(64, 20, bias=False)])
    model[2].weight = model[0].weight
    recipe = Recipe(
        rules=(Rule(types=("Embedding", "Conv1d", "Linear"), gives=Assignment.of(weight="int8:channel")),)
    )
    found = quantize_model(model, recipe, method="hadamard").model
    with torch.no_grad():
        assert torch.allclose(found[0](torch.arange(20)), model[0].weight, atol=0.05)
        x = torch.randn(2, 8, 9)
        assert torch.allclose(found[1](x), model[1](x), atol=0.05)
        y = torch.randn(3, 64)
        assert torch.allclose(found[2](y), model[2](y), atol=0.5)
    assert found[2].weight is found[0].weight
    restored = zp.dequantize_model(found)
    assert torch.equal(restored[0].weight, found[0](torch.arange(20)))


def test_gradients_pass_the_rotation() -> None:
    converted = quantize_model(layers(), "int8:g32", method="hadamard").model
    x = torch.randn(2, 96, requires_grad=True)
    converted(x).sum().backward()
    back = zp.dequantize_model(converted)
    y = x.detach().requires_grad_()
    back(y).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, y.grad, rtol=1e-3, atol=1e-5)


def test_a_rotated_model_is_exported() -> None:
    converted, x = quantize_model(layers(), "int8:g32", method="hadamard").model.eval(), torch.randn(2, 96)
    program = torch.export.export(converted, (x,))
    assert torch.allclose(program.module()(x), converted(x), rtol=1e-5, atol=1e-6)


def test_files_are_refused_and_weights_rotated_back_are_written(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    with pytest.raises(UnsupportedError, match="method hadamard64 rotates weights, and transformers runs no"):
        zp.quantize_checkpoint(source, tmp_path / "out", "w4a16", method="hadamard64")
    model = quantize_model(nn.Sequential(nn.Linear(128, 8), nn.Linear(8, 8)), mixed()).model
    with pytest.raises(UnsupportedError, match="layer 0 cannot be written: its codes are of a weight"):
        zp.save_checkpoint(model, tmp_path / "model")
    zp.save_checkpoint(model, tmp_path / "model", allow_float=True)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(saved["0.weight"], zp.dequantize_model(model)[0].weight)


def mixed() -> Recipe:
    rule = Rule(name="0", gives=Assignment.of(weight="int8:channel", method="hadamard"))
    return Recipe(rules=(rule,), default=Rule(gives=Assignment.of(weight="int8:channel")))


def test_a_graph_has_no_place_for_it() -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(32, 8)), (torch.ones(1, 32),))
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int4:g16", method="hadamard")))
    with pytest.raises(UnsupportedError, match="method hadamard rotates inputs, for which graphs have no"):
        quantize_graph(program, recipe)


@pytest.mark.parametrize(
    ("weight", "method", "error", "words"),
    [
        (torch.ones(2, 36), "hadamard8", ShapeError, "size .=8. of method hadamard8 must divide the last"),
        (torch.ones(2, 9), "hadamard", ShapeError, "the last axis of weight .shape .2, 9.. must be even"),
        (torch.full((2, 8), 3e38), "hadamard", RangeError, "overflows torch.float32 when method hadamard"),
        (torch.tensor([[1.0, torch.inf]]), "hadamard", NonFiniteError, r"\(0, 1\)"),
    ],
)
def test_weights_that_are_not_rotated_are_refused(
    weight: torch.Tensor, method: str, error: type[ZeropointError], words: str
) -> None:
    with pytest.raises(error, match=words):
        method_named(method).quantize(weight, Scheme.parse("int4:channel"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hadamard12", r"method 'hadamard12': size \(=12\) of a rotation must be a power of two"),
        ("hadamard+hadamard64", r"hadamard64 does not take rotated weights; use hadamard\+mse"),
        ("hadamard+lossless", r"lossless does not take rotated weights; use hadamard\+mse"),
        ("hadamard+mse_weighted", "mse_weighted needs statistics of inputs, which are not those of rotated"),
        ("hadamard+mze", "method 'mze' is unknown; did you mean mse"),
        ("hadamar", "method 'hadamar' is unknown; did you mean hadamard"),
        ("hadamard@", "method 'hadamard@' is unknown; did you mean hadamard"),
    ],
)
def test_a_spelling_that_means_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        method_named(text)


def test_layers_of_a_model_keep_their_kind() -> None:
    converted = quantize_model(layers(bias=False), "int4:g32", method="hadamard+mse")
    assert isinstance(converted.model[0], QuantizedLinear)
    assert "method hadamard+mse" in str(converted.layers[0])
