"""Prepared models are still the models they were, and converted ones can become them again."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.oracles import tiny_models
from torch import nn

import zeropoint as zp
from zeropoint.errors import CalibrationError, NonFiniteError, RecipeError, UnsupportedError
from zeropoint.models import QuantizedLinear, SplitAttention, parameter_groups
from zeropoint.recipes import Assignment, Recipe, Rule, parse_recipe

LAYER_TYPES = ("Linear", "Conv2d", "ConvTranspose1d", "LSTM", "Embedding", "EmbeddingBag", "GRUCell")
ALL = Recipe(rules=(Rule(types=LAYER_TYPES, gives=Assignment.of(weight="int8:channel")),))


class Zoo(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(10, 8, mode="sum")
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv2d(1, 2, 3, stride=2, padding=1)
        self.turn = nn.ConvTranspose1d(8, 4, 2)
        self.memory = nn.LSTM(8, 6, batch_first=True)
        self.cell = nn.GRUCell(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.table(index)
        x = self.attention(x, x, x)[0] + self.bag(index).unsqueeze(1)
        image = self.conv(x.unsqueeze(1)).mean()
        rotated = self.turn(x.transpose(1, 2)).mean()
        return self.head(self.cell(self.memory(x)[0][:, -1])) + image + rotated


INDEX = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_a_prepared_model_has_the_state_of_the_original_and_loads_either() -> None:
    original = Zoo().eval()
    prepared = zp.prepare(original, ALL, qat="lsq").eval()
    state = prepared.state_dict()
    floats = {name: value for name, value in state.items() if "quantizer" not in name}
    assert {n: tuple(t.shape) for n, t in floats.items()} == {
        n: tuple(t.shape) for n, t in original.state_dict().items()
    }
    fresh = Zoo().eval()
    fresh.load_state_dict(floats)
    assert torch.equal(fresh(INDEX), original(INDEX))
    other = zp.prepare(Zoo(), ALL, qat="lsq").eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(state)
    assert torch.equal(other(INDEX), prepared(INDEX))
    assert other.load_state_dict(original.state_dict(), strict=False).unexpected_keys == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_prepared_model_have_that_state_too(copied: Any) -> None:
    prepared = zp.prepare(Zoo(), ALL).eval()
    again = copied(prepared)
    assert list(again.state_dict()) == list(prepared.state_dict())
    again.load_state_dict(prepared.state_dict())
    assert torch.equal(again(INDEX), prepared(INDEX))


def test_a_converted_model_becomes_the_original_with_the_values_of_its_codes() -> None:
    original = Zoo().eval()
    converted = zp.quantize_model(original, ALL).model
    assert isinstance(converted.attention, SplitAttention)
    back = zp.dequantize_model(converted)
    assert {n: tuple(t.shape) for n, t in back.state_dict().items()} == {
        n: tuple(t.shape) for n, t in original.state_dict().items()
    }
    assert [type(m) for m in back.modules()] == [type(m) for m in original.modules()]
    assert back.table.padding_idx == 0
    torch.testing.assert_close(back(INDEX), converted(INDEX), atol=1e-5, rtol=1e-5)
    packed = converted.head.weight.quantized().dequantize()
    assert torch.equal(back.head.weight, packed)
    assert isinstance(converted.head, QuantizedLinear)


def test_tied_weights_stay_tied_on_the_way_back() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(16, 32), "head": nn.Linear(32, 16, bias=False)})
    model["head"].weight = model["table"].weight
    recipe = parse_recipe("default: w8a16\nrules: [{type: Embedding, weight: w8a16}]")
    back = zp.dequantize_model(zp.quantize_model(model, recipe).model, inplace=True)
    assert back["head"].weight is back["table"].weight


def test_there_must_be_something_to_dequantize() -> None:
    with pytest.raises(UnsupportedError, match="pass the model of a conversion"):
        zp.dequantize_model(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="convert it first"):
        zp.dequantize_model(zp.prepare(nn.Linear(32, 2), "w8a16"))
    with pytest.raises(UnsupportedError, match="for a model call dequantize_model"):
        zp.dequantize(nn.Linear(2, 2))


@pytest.mark.parametrize("make", [zp.prepare, lambda m, r: zp.quantize_model(m, r).model])
def test_layers_keep_the_attributes_of_those_they_replace(make: Any) -> None:
    model = make(Zoo(), ALL)
    assert (model.conv.stride, model.conv.kernel_size, model.conv.bias.shape) == ((2, 2), (3, 3), (2,))
    assert (model.memory.hidden_size, model.memory.batch_first) == (6, True)
    assert (model.head.in_features, model.head.out_features, model.head.bias.shape) == (4, 3, (3,))
    assert (model.table.num_embeddings, model.table.padding_idx) == (10, 0)
    with pytest.raises(AttributeError, match="strides"):
        _ = model.conv.strides


def test_a_weight_that_a_model_reads_past_a_converted_layer_says_what_to_do() -> None:
    model = zp.quantize_model(Zoo(), ALL).model
    with pytest.raises(UnsupportedError, match="leave that layer out by a rule"):
        torch.sum(model.conv.weight)


@pytest.mark.parametrize("act", [zp.prepare, zp.quantize_model])
def test_nothing_to_quantize_is_an_error_with_the_reasons(act: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"1 kept: the default is for Linear layers.*Rule\(types"):
        act(nn.Sequential(nn.Conv2d(1, 2, 3)), "w8a8")
    with pytest.raises(UnsupportedError, match="it has no layers"):
        act(nn.Sequential(nn.ReLU()), "w8a8")
    with pytest.raises(UnsupportedError, match="is quantized already"):
        act(zp.quantize_model(nn.Sequential(nn.Linear(8, 8)), "w8a8").model, "w8a8")


def test_a_layer_that_no_batch_reaches_is_named_with_what_to_do() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.unseen = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.seen(x)

    message = r"^unseen.input received no calibration data: .*name: 'unseen', keep: true"
    with pytest.raises(CalibrationError, match=message):
        zp.calibrate(Half(), "w8a8_static", [torch.randn(2, 8)])


@pytest.mark.parametrize("make", [zp.prepare, lambda m, r: zp.quantize_model(m, r).model])
@pytest.mark.parametrize("kind", ["Linear", "Conv2d"])
def test_numbers_that_are_not_finite_name_the_layer_they_reach(make: Any, kind: str) -> None:
    layer = nn.Linear(8, 8) if kind == "Linear" else nn.Conv2d(1, 1, 1)
    gives = Assignment.of(weight="int8:channel", input="int8:tensor dynamic")
    model = make(
        nn.ModuleDict({"deep": nn.Sequential(layer)}), Recipe(rules=(Rule(types=(kind,), gives=gives),))
    )
    with pytest.raises(NonFiniteError, match=r"^layer deep\.0: .*nan"):
        model["deep"](torch.full((1, 1, 8, 8), torch.nan))


def test_the_text_of_a_scheme_is_a_recipe_for_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    gives = [zp.quantize_model(model, text).layers[0].gives for text in ("int4:g32", "nf4", "W8A16")]
    assert list(map(str, gives)) == [
        "weight int4:g32",
        "weight nf4:g64",
        f"weight {zp.Scheme.parse('w8a16')}",
    ]
    assert str(parse_recipe("default: int4:g32").default.gives) == "weight int4:g32"
    with pytest.raises(RecipeError, match="write 'int4:channel' or 'int4:g128'"):
        zp.quantize_model(model, "int4")
    with pytest.raises(RecipeError, match="preset 'w4a61' is unknown; did you mean"):
        zp.quantize_model(model, "w4a61")
    with pytest.raises(RecipeError, match="such as 'int4:g32'"):
        zp.quantize_model(model, 4)  # type: ignore[arg-type]


def test_summaries_fold_layers_that_differ_in_numbers_and_are_what_a_notebook_shows() -> None:
    model = nn.Sequential(*(nn.ModuleDict({"up": nn.Linear(64, 8 + 8 * (n == 5))}) for n in range(6)))
    conversion = zp.quantize_model(model, "w8a16")
    lines = repr(conversion).splitlines()
    assert lines[0].startswith(
        "*.up (5 x Linear 8x64): weight int8:g128:scale=input:dialect=compressed-tensors; "
    )
    assert lines[1].startswith("5.up (Linear 16x64): ")
    assert len(lines) == 3
    calibration = zp.calibrate(nn.Sequential(nn.Linear(8, 8)), "w8a8_static", [torch.ones(2, 8)])
    assert repr(calibration).splitlines()[-1] == "learned from 1 batches"
    assert repr(zp.Scheme.parse("int4:g32")) == "Scheme('int4:g32')"
    folding = zp.fold(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).eval())
    assert repr(folding) == "1: folded into 0"


def test_learned_scales_have_a_rate_of_their_own() -> None:
    prepared = zp.prepare(nn.Sequential(nn.Linear(64, 8), nn.ReLU()), "w4a16", qat="lsq")
    prepared[0].bias.requires_grad_(False)
    groups = parameter_groups(prepared, lr=1e-3, scale_lr=1e-5, weight_decay=0.1)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [
        (1e-3, 0.1, 1),
        (1e-5, 0.0, 1),
    ]
    torch.optim.AdamW(groups).step()
    assert groups[0]["params"][0] is prepared[0].weight


def test_a_state_is_saved_and_loaded_through_a_file() -> None:
    prepared, file = zp.prepare(Zoo(), ALL).eval(), io.BytesIO()
    torch.save(prepared.state_dict(), file)
    file.seek(0)
    other = zp.prepare(Zoo(), ALL).eval()
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(INDEX), prepared(INDEX))


def tiny(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model of transformers whose layers are more than they seem, and an input."""
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    torch.manual_seed(0)
    if kind == "MobileNetV2":
        config = transformers.MobileNetV2Config(image_size=32, depth_multiplier=0.35, num_labels=3)
        return transformers.MobileNetV2ForImageClassification(config).eval(), (torch.randn(2, 3, 32, 32),)
    fields: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1}
    if kind == "Mamba2":
        fields |= {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}
    elif kind == "Falcon":
        fields |= {"num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**fields)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval(), (torch.arange(1, 9)[None],)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["MobileNetV2", "Mamba", "Mamba2", "Falcon"])
def test_models_that_read_attributes_of_their_layers_are_trained(kind: str) -> None:
    model, args = tiny(kind)
    types = ("Conv2d",) if kind == "MobileNetV2" else ("Linear", "Conv1d")
    gives = Assignment.of(weight="int8:channel")
    prepared = zp.prepare(model, Recipe(rules=(Rule(types=types[:1], gives=gives),)), qat="lsq")
    prepared(*args).logits.square().mean().backward()
    learned = parameter_groups(prepared, lr=1.0)[1]["params"]
    assert len(learned) > 2
    assert any(p.grad is not None for p in learned)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["MobileNetV2", "Falcon"])
def test_models_that_read_attributes_of_their_layers_are_converted(kind: str) -> None:
    model, args = tiny(kind)
    types = ("Conv2d",) if kind == "MobileNetV2" else ("Linear",)
    conversion = zp.quantize_model(
        model, Recipe(rules=(Rule(types=types, gives=Assignment.of(weight="int8:channel")),))
    )
    assert sum(layer.gives is not None for layer in conversion.layers) > 3
    with torch.no_grad():
        found, expected = conversion.model(*args).logits, model(*args).logits
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


def test_what_tensors_have_and_packed_weights_have_not_says_what_to_do() -> None:
    weight = zp.quantize_model(nn.Sequential(nn.Linear(64, 8)), "w8a16").model[0].weight
    with pytest.raises(AttributeError, match=r"no attribute 'squeeze'.*leave that layer out by a rule"):
        weight.squeeze()
    assert not hasattr(weight, "nonsense")


@pytest.mark.filterwarnings("ignore")
def test_what_trainer_does_with_checkpoints_works_for_prepared_models(tmp_path: Any) -> None:
    """It calls save_pretrained, reads the file, and loads its tensors by name, not strictly."""
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    first, second = (
        zp.prepare(tiny_models.llama(seed=seed, tie_word_embeddings=True), "int4:g32", qat="lsq").eval()
        for seed in (0, 1)
    )
    first.save_pretrained(tmp_path)
    found = second.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], [])
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(second(ids).logits, first(ids).logits)
    floats, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert all("quantizer" in name for name in info["unexpected_keys"])
    trained = first.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in floats.state_dict().items())
