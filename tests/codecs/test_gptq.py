"""GPTQ files: decoded as GPTQModel decodes them, by a formula of its own here, and words that are known."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import LLAMA, dequantized, quantize, save

import zeropoint as zp
from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.codecs.gptq import CODEC
from zeropoint.codecs.gptq_config import named_layers
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.codecs.words import fields_of, words_of
from zeropoint.errors import CheckpointError, UnsupportedError

SCHEMES = (
    "int4:g128",
    "int4:g32:asym",
    "int8:g64",
    "int2:g128",
    "int3:g32",
    "int3:channel:asym",
    "int4:channel",
)
SHAPE = (96, 256)


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def encoded(layer: LayerScheme, x: torch.Tensor) -> dict[str, torch.Tensor]:
    q = zp.quantize(x, layer.weight)
    return CODEC.encode(layer, q) | CODEC.constants(layer, q.params, q.shape)


def stream(words: list[int], bits: int) -> list[int]:
    """Return the fields of a column of words: bit after bit, low ones first, as in a number of many words."""
    number = sum((word % 2**32) << (32 * at) for at, word in enumerate(words))
    return [(number >> (bits * at)) % 2**bits for at in range(32 * len(words) // bits)]


def by_hand(tensors: dict[str, torch.Tensor], bits: int, *, first_version: bool) -> torch.Tensor:
    """Return ``scales[g_idx] * (q - zeros[g_idx])``, as GPTQModel has it: (inputs, outputs)."""
    codes = torch.tensor([stream(column, bits) for column in tensors["qweight"].t().tolist()]).t()
    zeros = torch.tensor([stream(row, bits) for row in tensors["qzeros"].tolist()]) + first_version
    groups = tensors["g_idx"].long()
    return tensors["scales"].float()[groups] * (codes - zeros[groups]).float()


@pytest.mark.parametrize("text", SCHEMES)
def test_another_decoder_gives_the_same_values(text: str) -> None:
    layer = layer_scheme(text, CODEC)
    x = weight(*SHAPE)
    theirs = by_hand(encoded(layer, x), layer.weight.bits, first_version=layer.layout == "gptq")
    ours = zp.quantize(x, layer.weight).dequantize(torch.float32)
    assert torch.equal(ours, theirs.t())


def test_signed_scales_have_the_values_of_another_decoder() -> None:
    layer = layer_scheme("int4:g32:scale=signed", CODEC)
    assert str(layer.weight) == "int4:g32:scale=signed/float16"
    x = weight(*SHAPE)
    tensors = encoded(layer, x)
    assert bool((tensors["scales"] < 0).any())
    ours = zp.quantize(x, layer.weight).dequantize(torch.float32)
    assert torch.equal(ours, by_hand(tensors, 4, first_version=layer.layout == "gptq").t())


def test_known_words() -> None:
    # Codes 0 to 7, from the lowest bits on; the zero point 8 of symmetric weights is stored as 7.
    layer = layer_scheme("int4:g8", CODEC)
    x = torch.arange(-8.0, 0.0).repeat(8, 1)
    x[:, 0] = -7.5
    tensors = encoded(layer, x)
    assert [hex(word % 2**32) for word in tensors["qweight"][0].tolist()] == ["0x76543210"] * 8
    assert [hex(word % 2**32) for word in tensors["qzeros"][0].tolist()] == ["0x77777777"]


def test_a_weight_whose_outputs_fill_no_whole_words_is_kept() -> None:
    layer = layer_scheme("int4:g128", CODEC)
    assert CODEC.refusal(layer, (100, 256)) == "first axis 100 does not fill whole words, of 8 codes"
    assert CODEC.refusal(layer, (96, 200)) == "last axis 200 is not a multiple of the group, 128"


UP = [f"model.layers.{n}.mlp.up_proj" for n in (0, 1)]


@pytest.mark.parametrize(
    ("quantized", "kept", "named"),
    [
        (UP, ["model.embed_tokens", "lm_head"], None),
        ([*UP, "lm_head"], [], ["mlp.up_proj", "lm_head"]),
        (UP, ["model.layers.0.mlp.gate"], ["mlp.up_proj"]),
        (UP, ["model.layers.2.mlp.up_proj"], UP),
        (["bert.encoder.layer.0.output.dense"], [], ["output.dense"]),
        (["layers.0.mlp.up_proj"], ["head.weight"], ["mlp.up_proj"]),
        ([*UP, "model.layers.2.mlp.experts.0.up_proj"], ["model.layers.2.mlp.gate"], None),
    ],
)  # fmt: skip
def test_layers_are_named_where_loaders_would_take_others(
    quantized: list[str], kept: list[str], named: list[str] | None
) -> None:
    found = named_layers(quantized, kept, {})
    assert found == (
        {} if named is None else {"block_name_to_quantize": "", "modules_in_block_to_quantize": [named]}
    )


def files(folder: Path, tensors: dict[str, torch.Tensor], **settings: object) -> Path:
    """Write a checkpoint of one layer, ``a.up_proj``, as somebody else has it."""
    stored = {f"a.up_proj.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, **settings}
    config = {"model_type": "llama", "dtype": "float32", "quantization_config": section}
    return save(folder, stored, config)


def floats(path: Path, out: Path) -> torch.Tensor:
    """Return the weight of such a checkpoint, dequantized."""
    return dequantized(path, out)["a.up_proj.weight"]


def act_ordered(text: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight whose columns were grouped in a random order and stored in their own."""
    layer, order = layer_scheme(text, CODEC), torch.randperm(x.shape[1])
    tensors, bits, back = encoded(layer, x[:, order]), layer.weight.bits, order.argsort()
    fields = fields_of(tensors["qweight"].t().contiguous(), bits)[:, back]
    return {
        **tensors, "qweight": words_of(fields.contiguous(), bits).t(), "g_idx": tensors["g_idx"][back],
    }  # fmt: skip


@pytest.mark.parametrize("text", ["int4:g32", "int3:g32:asym", "int8:g64"])
def test_act_order_is_read_with_the_values_of_another_decoder(text: str, tmp_path: Path) -> None:
    x = weight(*SHAPE).half()
    tensors, scheme = act_ordered(text, x), layer_scheme(text, CODEC).weight
    bits, asym = scheme.bits, "asym" in text
    given = {"bits": bits, "group_size": int(text.split(":")[1][1:]), "sym": not asym, "desc_act": True}
    version = "gptq_v2" if asym else "gptq"
    path = files(tmp_path / "in", tensors, **given, checkpoint_format=version)
    assert zp.verify_checkpoint(path).problems == ()
    (seen,) = zp.inspect_checkpoint(path).schemes
    assert (seen.scheme, seen.layout) == (str(scheme), f"{version} with act-order")
    found = floats(path, tmp_path / "out")
    assert torch.equal(found, by_hand(tensors, bits, first_version=not asym).t())


@pytest.mark.parametrize("text", ["int4:g32", "int4:g32:asym", "int8:g64", "int3:g32:asym"])
def test_act_order_is_converted_and_back_with_the_same_tensors(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 1)
    x = weight(*SHAPE).half()
    tensors, asym = act_ordered(text, x), "asym" in text
    version = "gptq_v2" if asym else "gptq"
    bits, group = layer_scheme(text, CODEC).weight.bits, int(text.split(":")[1][1:])
    given = {"bits": bits, "group_size": group, "sym": not asym, "desc_act": True}
    path = files(tmp_path / "in", tensors, **given, checkpoint_format=version)
    wanted = floats(path, tmp_path / "floats")
    for name, source in (
        ("compressed-tensors", path),
        ("gptq", tmp_path / "compressed-tensors"),
        ("again", path),
    ):
        result = zp.convert_checkpoint(str(source), str(tmp_path / name), "gptq" if name == "again" else name)
        assert result.error.sqnr_db == math.inf
        assert not zp.verify_checkpoint(tmp_path / name, source).problems
        assert torch.equal(floats(tmp_path / name, tmp_path / f"{name}-floats"), wanted)
    theirs = load_file(tmp_path / "compressed-tensors" / "model.safetensors")
    assert torch.equal(theirs["a.up_proj.weight_g_idx"], tensors["g_idx"])
    section = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    (entry,) = section["config_groups"].values()
    assert (entry["format"], entry["weights"]["actorder"]) == ("pack-quantized", "group")
    for name in ("gptq", "again"):
        ours = load_file(tmp_path / name / "model.safetensors")
        assert ours.keys() == {f"a.up_proj.{part}" for part in tensors}
        assert all(torch.equal(ours[f"a.up_proj.{part}"], tensor) for part, tensor in tensors.items())
        section = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert (section["desc_act"], section["checkpoint_format"]) == (True, version)
        assert section["dynamic"] == {}


def test_layouts_without_a_place_for_the_order_refuse_it_in_the_plan(tmp_path: Path) -> None:
    tensors = act_ordered("int4:g32", weight(*SHAPE).half())
    path = files(tmp_path / "in", tensors, desc_act=True)
    for layout in ("awq", "mlx", "torchao", "gguf"):
        with pytest.raises(UnsupportedError, match=f"out of order .act-order., which {layout} does not hold"):
            zp.convert_checkpoint(str(path), str(tmp_path / layout), layout)
    with pytest.raises(UnsupportedError, match=r"out of order .act-order., so int8:g32.* must store its num"):
        zp.convert_checkpoint(str(path), str(tmp_path / "x"), "gptq", to="int8:g32:scale=float16")


def test_zero_points_of_the_first_version_may_borrow_from_each_other(tmp_path: Path) -> None:
    # What GPTQModel saves for asymmetric weights: words of the second version, less 1 in each field.
    x = weight(*SHAPE).half().abs()
    tensors = encoded(layer_scheme("int4:g32:asym", CODEC), x)
    assert (fields_of(tensors["qzeros"], 4) == 0).any()
    first = {**tensors, "qzeros": tensors["qzeros"] - 0x11111111}
    path = files(tmp_path / "in", first, sym=False)
    found = floats(path, tmp_path / "out")
    assert torch.equal(found, by_hand(tensors, 4, first_version=False).t())
    (problem,) = zp.verify_checkpoint(path).problems
    assert "a zero point is stored as 15, which engines read in different ways" in problem.what


def mixture(folder: Path) -> Path:
    names = [f"model.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")]
    tensors = {f"{name}.weight": weight(*SHAPE) for name in [*names, "lm_head"]}
    return save(folder, tensors, LLAMA)


def recipe(folder: Path, queries: str) -> RecipeText:
    path = folder / "recipe.yaml"
    rules = f"rules:\n- {{name: '*.q_proj', weight: '{queries}'}}\n- {{type: Head, weight: 'int8:g32'}}\n"
    path.write_text("default: int4:g32\n" + rules)
    return RecipeText.read(path)


def test_several_schemes_are_rules_of_dynamic_which_are_read_back(tmp_path: Path) -> None:
    source = mixture(tmp_path / "in")
    zp.quantize_checkpoint(source, tmp_path / "out", recipe(tmp_path, "int8:g64"), format="gptq")
    section = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert (section["bits"], section["group_size"], section["lm_head"]) == (4, 32, True)
    rules = {rule.removeprefix("+:"): given for rule, given in section["dynamic"].items()}
    fused = "model.layers.1.self_attn.qkv_proj"
    for name, bits in (("model.layers.1.self_attn.q_proj", 8), (fused, 8), ("lm_head", 8)):
        found = [given for rule, given in rules.items() if re.match(rule, name)]
        assert [given["bits"] for given in found] == [bits]
    assert not any(re.match(rule, "model.layers.1.mlp.down_proj") for rule in rules)
    (tmp_path / "out" / "zeropoint_manifest.json").unlink()
    assert zp.verify_checkpoint(tmp_path / "out", source).problems == ()
    seen = {s.scheme: s.layers for s in zp.inspect_checkpoint(tmp_path / "out").schemes}
    assert seen == {f"int{b}:g{g}:scale=float16": n for b, g, n in ((4, 32, 2), (8, 64, 2), (8, 32, 1))}


def test_a_head_that_the_configuration_leaves_out_is_named(tmp_path: Path) -> None:
    source = mixture(tmp_path / "in")
    zp.quantize_checkpoint(source, tmp_path / "out", recipe(tmp_path, "int8:g64"), format="gptq")
    (tmp_path / "out" / "zeropoint_manifest.json").unlink()
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace('"lm_head": true', '"lm_head": false'))
    (problem,) = zp.verify_checkpoint(tmp_path / "out").problems
    assert problem.what == "it is quantized, but lm_head is false in the configuration; correct it"


def test_symmetric_and_asymmetric_layers_take_two_files(tmp_path: Path) -> None:
    source = mixture(tmp_path / "in")
    with pytest.raises(CheckpointError, match="make all of them symmetric, or all asym"):
        zp.quantize_checkpoint(source, tmp_path / "out", recipe(tmp_path, "int8:g64:asym"), format="gptq")


def checkpoint(folder: Path) -> Path:
    return save(folder, {"a.up_proj.weight": weight(*SHAPE), "a.down_proj.weight": weight(96, 200)}, LLAMA)


def test_the_configuration_says_what_loaders_ask_for(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in")
    quantize(source, tmp_path / "out", "w4a16", codec=CODEC)
    second = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == second
    wanted = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}
    assert {key: second[key] for key in wanted} == wanted
    assert list(second["dynamic"]) == [r"-:^a\.down_proj$"]
