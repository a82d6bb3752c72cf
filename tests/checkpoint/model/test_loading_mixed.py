"""Several schemes in one checkpoint: transformers finds that of each layer, and decodes what we decode."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import ONE, quantize, tensors_of
from tests.oracles import synthetic_llama
from tests.peers import transformers

from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.read.quantized_layers import find_layers
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.tensor_fields import WeightPart

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations

RECIPES = {
    "attention and mlp": """\
rules:
  - {name: "*.layers.0.mlp.down_proj", keep: its inputs have outliers}
  - {name: "*.self_attn.*_proj", preset: w8a8}
  - {name: "*.mlp.*_proj", preset: mxfp4}
""",
    "layer by layer": """\
default: w4a16
rules:
  - {name: "*.layers.1.*", type: Linear, preset: fp8_dynamic}
  - {name: lm_head, preset: w8a16}
""",
    "by shape": "default: nvfp4a16\nrules: [{shape: '*,512', preset: 'int3:g64'}]",
    "one layout twice": "default: 'int4:g32'\nrules: [{name: '*.k_proj', preset: 'int8:channel'}]",
}


def written(recipe: str, folder: Path, *, moe: bool = False) -> Path:
    source = synthetic_llama.write(folder / "in", moe=moe)
    quantize(source, folder / "out", RecipeText(text=recipe), limits=ONE)
    return folder / "out"


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the value of each weight as our codec has it, and the tensors that are as they were."""
    source = open_source(folder)
    stored, tensors = find_layers(source), tensors_of(folder)
    found = {entry.name: tensors[entry.name].float() for entry in stored.others}
    for layer in stored.layers:
        parts = {suffix: tensors[entry.name] for suffix, entry in layer.tensors.items()}
        q = layer.codec.decode(layer.layer, parts, WeightPart(0, layer.shape, layer.dtype))
        found[f"{layer.module}.weight"] = q.dequantize().float()
    return found


def of_expert(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return, of a model's parameters, the weight that a file has under ``name``; an expert's is a slice."""
    experts, _, rest = name.partition(".experts.")
    number, _, part = rest.partition(".")
    if not number.isdigit():
        return weights[name]
    if part == "down_proj.weight":
        return weights[f"{experts}.experts.down_proj"][int(number)]
    both = weights[f"{experts}.experts.gate_up_proj"][int(number)]
    return both.chunk(2)[0 if part == "gate_proj.weight" else 1]


def differing(folder: Path) -> list[str]:
    """Return the weights that transformers loads with other values than we decode."""
    model, _ = loaded(folder)
    weights = dict(model.named_parameters())
    return [
        name
        for name, value in decoded(folder).items()
        if not torch.equal(of_expert(weights, name).float(), value.bfloat16().float())
    ]


def loaded(folder: Path) -> tuple[torch.nn.Module, dict[str, set[str]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        with torch.no_grad():  # the first call decompresses
            model(torch.arange(1, 9).reshape(1, -1))
    return model, {key: value for key, value in info.items() if value}


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformers_loads_the_weights_that_we_decode(recipe: str, tmp_path: Path) -> None:
    out = written(RECIPES[recipe], tmp_path)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) > 1
    model, problems = loaded(out)
    assert problems == {}
    expected = decoded(out)
    found = {name: p.float() for name, p in model.named_parameters() if name.endswith("weight")}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.bfloat16().float()), name


def test_the_format_of_the_whole_is_mixed_precision_only_where_layouts_differ(tmp_path: Path) -> None:
    formats = {}
    for number, recipe in enumerate(RECIPES):
        out = written(RECIPES[recipe], tmp_path / str(number))
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        formats[recipe] = (config["format"], {g["format"] for g in config["config_groups"].values()})
    assert formats["attention and mlp"] == ("mixed-precision", {"int-quantized", "mxfp4-pack-quantized"})
    assert formats["one layout twice"] == ("pack-quantized", {"pack-quantized"})


def test_experts_are_loaded_with_their_own_scheme(tmp_path: Path) -> None:
    recipe = "default: w8a8\nrules: [{name: '*.experts.*', preset: w4a16}]"
    assert differing(written(recipe, tmp_path, moe=True)) == []
