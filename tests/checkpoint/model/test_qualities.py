"""A quality of a checkpoint: its bytes are those of the method, and the report says what it fell back on."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import tensors_of
from tests.oracles import tiny_models
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.model.running_model import with_decoder_ids
from zeropoint.checkpoint.plan.learned_data import offered_quality
from zeropoint.checkpoint.run.loop import RunResult
from zeropoint.recipes import Quality
from zeropoint.recipes.quality import LADDER

pytestmark = pytest.mark.rotating

GOOD = next((alone, with_inputs) for own, alone, with_inputs in LADDER if own is Quality.GOOD)


def weights_of(folder: Path, ending: str = "safetensors") -> dict[str, bytes]:
    """Return the files of weights; the manifest has the recipe, with the word that was asked for."""
    return {path.name: path.read_bytes() for path in folder.glob(f"*.{ending}")}


def ids() -> torch.Tensor:
    return torch.randint(0, 512, (8, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("scheme", "method"), [("int4:g64", GOOD[0]), ("w4a8", GOOD[1])])
def test_a_quality_writes_the_bytes_of_its_method(
    source: Path, tmp_path: Path, scheme: str, method: str
) -> None:
    for name, asked in (("a", {"quality": "good"}), ("b", {"method": method})):
        zp.quantize_checkpoint(source, tmp_path / name, scheme, calibration=ids(), ignore="lm_head", **asked)
    written = [weights_of(tmp_path / name) for name in "ab"]
    assert written[0] == written[1] != {}


def test_a_scheme_that_the_chain_refuses_falls_back_and_the_report_says_so(
    source: Path, tmp_path: Path
) -> None:
    options = {"format": "gguf", "calibration": ids()}
    result = zp.quantize_checkpoint(source, tmp_path / "a", "tq1_0", quality="best", **options)
    zp.quantize_checkpoint(source, tmp_path / "b", "tq1_0", method="ggml", **options)
    written = [[path.read_bytes() for path in (tmp_path / name).glob("*.gguf")] for name in "ab"]
    assert written[0] == written[1] != []
    (fell,) = (note for note in result.notes if "falls back" in note)
    assert fell.startswith("quality='best' falls back on ggml for tq1_0: method ")
    assert fell.endswith("several together")


def test_data_without_use_are_said_to_be(source: Path, tmp_path: Path) -> None:
    options = {"quality": "fast", "calibration": tmp_path / "absent.txt"}
    result = zp.quantize_checkpoint(source, tmp_path / "out", "int4:g64", **options)
    assert "no method takes calibration data, which are not read" in result.notes


def test_a_rule_keeps_its_method_and_is_no_fall(source: Path, tmp_path: Path) -> None:
    recipe = "rules: [{name: '*.down_proj', weight: 'int4:g64', method: mse}]\ndefault: w8a16"
    result = zp.quantize_checkpoint(source, tmp_path / "out", recipe=recipe, quality="fast")
    assert {weight.method for weight in result.plan.weights} == {"mse"}
    assert not any("falls back" in note for note in result.notes)


@pytest.mark.parametrize(
    ("scheme", "options", "offered"),
    [
        ("w4a16", {}, True),
        ("w8a16", {}, False),
        ("w4a16", {"method": "nearest"}, False),
        ("w4a16", {"quality": "fast"}, False),
        ("w4a16", {"method": "mse_weighted", "calibration": "random"}, False),
    ],
)
def test_few_bits_rounded_to_nearest_by_default_get_a_line_about_data(
    source: Path, tmp_path: Path, scheme: str, options: dict[str, str], offered: bool
) -> None:
    result = zp.quantize_checkpoint(source, tmp_path / "out", scheme, **options)
    said = list(offered_quality(result.plan))
    assert bool(said) == offered
    assert not said or said[0].startswith("with quality='good' and calibration=DATA outputs come closer")


def test_a_quality_of_a_plan_is_refused(source: Path, tmp_path: Path) -> None:
    plan = zp.plan_checkpoint(source, "w4a16", out=tmp_path / "plan.json")
    assert plan.recipe.quality is None
    with pytest.raises(
        zp.OptionError, match=r"^quality='fast' picks methods for to=SCHEME or recipe=FILE; le"
    ):
        zp.quantize_checkpoint(source, tmp_path / "out", plan=tmp_path / "plan.json", quality="fast")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are multiples of 256, as K-quants need them."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512}
    tiny_models.llama(layers=2, initializer_range=0.1, **sizes).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("quality", "others"), [("good", "shift+gptq"), ("best", "shift+signround")])
def test_an_embedding_gets_the_method_without_data_and_the_report_names_it(
    wide: Path, tmp_path: Path, quality: str, others: str
) -> None:
    given = {"format": "gguf", "calibration": ids(), "force": True}
    result = zp.quantize_checkpoint(wide, tmp_path / "out", "q4_k_m", quality=quality, **given)
    methods = {weight.module: weight.method for weight in result.plan.weights}
    assert methods.pop("model.embed_tokens") == "ggml"
    assert set(methods.values()) == {others}
    said = f"quality={quality!r} falls back on ggml for 1 weight without inputs to learn from: 'model.embed_"
    assert sum(note.startswith(said) for note in result.notes) == 1
    head = "1 weight outside of all blocks, such as 'lm_head', keep the codes of shift+gptq"
    assert sum(note == head for note in result.notes) == (quality == "best")
    assert zp.verify_checkpoint(tmp_path / "out", wide).ok
    plan = zp.plan_checkpoint(wide, "q4_k_m", quality=quality, format="gguf")
    assert [weight.method for weight in plan.weights] == [weight.method for weight in result.plan.weights]
    assert any(note.startswith(said) for note in plan.notes)
    named = zp.quantize_checkpoint(wide, tmp_path / "other", "q4_k_m", method=others, **given)
    assert weights_of(tmp_path / "other", "gguf") == weights_of(tmp_path / "out", "gguf") != {}
    assert sum(note.startswith("the method falls back on ggml for 1 weight") for note in named.notes) == 1


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vision tower, whose list of blocks is the longer one."""
    folder = tmp_path_factory.mktemp("llava")
    tiny_models.llava().save_pretrained(folder)
    return folder


IN_TEXT, ELSEWHERE = 2 * 7, 4 * 6 + 2
"""Linear weights of the text's blocks, and of the vision tower and what joins the two."""
_ON_LLAVA: dict[str, object] = {"calibration": ids(), "ignore": "*.lm_head", "force": True}


def methods_of(result: RunResult, *, text: bool) -> list[str]:
    """Return the methods of weights of the text's blocks, or of others."""
    return [weight.method for weight in result.plan.weights if ("language_model" in weight.module) == text]


def errors_of(result: RunResult) -> dict[str, float]:
    """Return relative errors of weights; codes of another weight are off by as much as the weight itself."""
    return {about["module"]: about["error"]["relative"] for about in result.to_dict()["weights"]}


def test_a_vision_tower_is_quantized_without_data_and_blocks_are_of_the_text(
    llava: Path, tmp_path: Path
) -> None:
    results = [
        zp.quantize_checkpoint(llava, tmp_path / name, "int4:g64", **asked, **_ON_LLAVA)
        for name, asked in (("a", {"quality": "good"}), ("b", {"method": GOOD[0]}))
    ]
    for result, asked in zip(results, ("quality='good'", "the method"), strict=True):
        assert methods_of(result, text=True) == [GOOD[0]] * IN_TEXT
        assert methods_of(result, text=False) == ["mse"] * ELSEWHERE
        (fell,) = (note for note in result.notes if "falls back" in note)
        assert fell.startswith(f"{asked} falls back on mse for {ELSEWHERE} weights without inputs to learn")
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")
    assert zp.verify_checkpoint(tmp_path / "a", llava).ok
    zp.quantize_checkpoint(llava, tmp_path / "c", "int4:g64", quality="fast", ignore="*.lm_head")
    good, fast = (tensors_of(tmp_path / name) for name in "ac")
    other = {name.rpartition(".")[0] for name in fast if not torch.equal(good[name], fast[name])}
    assert other == {w.module for w in results[0].plan.weights if "language_model" in w.module}


def test_an_attention_module_of_torch_has_the_weights_of_its_file(tmp_path: Path) -> None:
    """The head of SigLIP is one, of which four layers are made while the model runs."""
    tiny_models.llava(tower="Siglip", layers=1).save_pretrained(tmp_path / "in")
    result = zp.quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", "int4:g64", quality="good", **_ON_LLAVA
    )
    assert any(weight.module.endswith("head.attention.out_proj") for weight in result.plan.weights)
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok


def test_static_inputs_that_no_token_reaches_keep_their_weights_as_floats(
    llava: Path, tmp_path: Path
) -> None:
    static = zp.quantize_checkpoint(llava, tmp_path / "a", "fp8", **_ON_LLAVA)
    assert (len(methods_of(static, text=True)), methods_of(static, text=False)) == (IN_TEXT, [])
    (kept,) = (note for note in static.notes if "stay floats" in note)
    assert kept.startswith(f"{ELSEWHERE} weights without inputs to learn from stay floats, since scales")
    assert zp.verify_checkpoint(tmp_path / "a", llava).ok
    with pytest.raises(zp.CheckpointError, match=f"{ELSEWHERE} linear weights would stay unquantized"):
        zp.quantize_checkpoint(llava, tmp_path / "b", "fp8", strict=True, **_ON_LLAVA)


def test_statistics_of_some_weights_leave_others_to_a_method_without_data(
    llava: Path, tmp_path: Path
) -> None:
    zp.gather_statistics(llava, tmp_path / "gram.safetensors", ids(), gram=True)
    for method, given in (
        ("mse_weighted", _ON_LLAVA),
        ("gptq", {"statistics": tmp_path / "gram.safetensors", "ignore": "*.lm_head", "force": True}),
    ):
        result = zp.quantize_checkpoint(llava, tmp_path / method, "int4:g64", method=method, **given)
        assert methods_of(result, text=True) == [method] * IN_TEXT
        assert methods_of(result, text=False) == ["mse"] * ELSEWHERE


def test_experts_that_a_module_multiplies_with_as_one_stack_are_solved(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=2, vocab_size=512,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_local_experts=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(parameter, std=0.1)  # the model leaves them empty
    model.save_pretrained(tmp_path / "in")
    options = {"calibration": ids(), "ignore": "lm_head", "force": True}
    result = zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "int4:g64", quality="good", **options)
    assert {weight.method for weight in result.plan.weights} == {GOOD[0]}
    assert sum(".experts." in weight.module for weight in result.plan.weights) == 2 * 2 * 3
    assert max(errors_of(result).values()) < 0.25
    assert result.notes[-1].startswith("KL divergence")
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok


def test_layers_that_files_join_are_solved_and_run(tmp_path: Path) -> None:
    """Files of nomic-bert hold query, key and value in one tensor, and transformers has three layers."""
    config = transformers.NomicBertConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2, vocab_size=512
    )
    torch.manual_seed(0)
    transformers.NomicBertForMaskedLM(config).save_pretrained(tmp_path / "in")
    assert any("Wqkv" in name for name in tensors_of(tmp_path / "in"))
    result = zp.quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", "int4:g64", quality="good", calibration=ids()
    )
    assert {weight.method for weight in result.plan.weights} == {GOOD[0]}
    assert sum("q_proj" in weight.module for weight in result.plan.weights) == 2
    assert result.notes[-1].startswith("KL divergence")
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok
    assert max(errors_of(result).values()) < 0.25


def test_experts_whose_rows_files_have_in_another_order_are_solved(tmp_path: Path) -> None:
    """Files of Inkling 2 hold rows of gate and up in turn, and transformers has one below the other."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = transformers.Inkling2TextConfig(
        hidden_size=64, moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, vocab_size=512,
        num_hidden_layers=2, layer_types=["hybrid_sliding", "hybrid"], unpadded_vocab_size=512,
        max_position_embeddings=128, rel_extent=64, **heads,
        **{f"swa_{name}": number for name, number in heads.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Inkling2ForCausalLM(config).save_pretrained(tmp_path / "in")
    options = {"quality": "good", "calibration": ids(), "force": True}
    result = zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "int4:g64", **options)
    assert sum(".experts." in weight.module for weight in result.plan.weights) >= 2 * 4 * 3
    assert max(errors_of(result).values()) < 0.3


@pytest.mark.parametrize(
    "asked", [{"quality": "good"}, {"method": "smooth+gptq"}, {"method": "mse_weighted"}]
)
def test_a_model_all_of_whose_weights_are_stored_transposed_learns_from_data(
    asked: dict[str, str], tmp_path: Path
) -> None:
    """A smoothed input of GPT-2 is the output of a norm, and its weight lies as (in, out) in the files."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=512, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "in")
    options = {"calibration": ids(), **asked}
    result = zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "int4:g32", **options)
    assert len(result.plan.weights) == 8
    assert max(errors_of(result).values()) < 0.25
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok


def test_a_step_leaves_inputs_of_weights_that_files_have_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AriaTextConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=512, moe_num_experts=2, moe_topk=1, moe_num_shared_experts=1,
        max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    transformers.AriaTextForCausalLM(config).save_pretrained(tmp_path / "in")
    options = {"method": "smooth+gptq", "calibration": ids(), "force": True}
    result = zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "int8:channel", **options)
    rescaled = next(note for note in result.notes if "not rescaled" in note)
    assert re.fullmatch(
        r"channels of model\.layers\.0\.\S+ and \d more inputs of its block are not rescaled: the files have "
        r"these weights otherwise; likewise in 1 more block",
        rescaled,
    )
    names = json.loads((tmp_path / "out/zeropoint_rescaled.json").read_text())["tensors"]
    assert any(name.endswith("v_proj.weight") for name in names)
    assert not any(".experts." in name for name in names)  # which are stored transposed
    assert {weight.method for weight in result.plan.weights if "v_proj" in weight.module} == {"smooth+gptq"}
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok


def test_a_decoder_behind_an_encoder_is_given_its_tokens(tmp_path: Path) -> None:
    config = transformers.T5Config(
        d_model=64, d_ff=64, d_kv=32, num_heads=2, num_layers=2, vocab_size=512, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "in")
    result = zp.quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", "int4:g64", quality="good", calibration=ids()
    )
    assert {weight.method for weight in result.plan.weights} == {GOOD[0]}
    assert sum("EncDecAttention" in weight.module for weight in result.plan.weights) == 2 * 4
    assert result.notes[-1].startswith("KL divergence")
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok


def test_the_tokens_of_a_decoder_are_those_that_bart_makes_by_itself() -> None:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    batch = with_decoder_ids(model, {"input_ids": ids()})
    assert batch.keys() == {"input_ids", "decoder_input_ids"}
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(input_ids=ids()).logits)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_a_vision_model_are_solved_in_either_order_of_axes(
    transposed: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 2,
            "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 512,
            "num_key_value_heads": 1, "head_dim": 32,
            "rope_parameters": {"mrope_section": [8, 4, 4], "rope_type": "default"},
        },
        vision_config={**sizes, "depth": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path / "in")
    if transposed:  # as the files that were published
        own = tensors_of(tmp_path / "in")
        experts = {name: x.mT.contiguous() for name, x in own.items() if ".experts." in name}
        assert all(x.ndim == 3 for x in experts.values())
        save_file({**own, **experts}, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    options = {"quality": "good", "calibration": ids(), "ignore": "*lm_head", "force": True}
    result = zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "int4:g32", **options)
    experts = [weight for weight in result.plan.weights if ".experts." in weight.module]
    assert {weight.method for weight in experts} == {GOOD[0]}
    assert len(experts) == 2 * 3
    assert result.notes[-1].startswith("KL divergence 0.0")
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok


def test_scales_less_their_mean_are_solved_for_and_less_is_lost(wide: Path, tmp_path: Path) -> None:
    """The mean is that of the scales of the solved weight, which the file subtracts from them."""
    losses = {}
    for name, given in (("fast", {}), ("good", {"calibration": ids()})):
        result = zp.quantize_checkpoint(wide, tmp_path / name, "nf4_double", quality=name, **given)
        assert zp.verify_checkpoint(tmp_path / name, wide).ok
        assert not any("falls back" in note for note in result.notes) or name == "fast"
        zp.dequantize_checkpoint(tmp_path / name, tmp_path / f"{name}-floats", dtype="float32")
        models = [
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for path in (wide, tmp_path / f"{name}-floats")
        ]
        with torch.no_grad():
            wanted, found = (model(ids()).logits for model in models)
        losses[name] = float((wanted - found).square().sum())
    assert losses["good"] < 0.8 * losses["fast"]
    weights = result.to_dict()["weights"]
    # What feedback knows of outputs is of scales before they are rounded to eight bits.
    assert all(weight["loss"]["outputs"] is None for weight in weights)


def test_scales_less_their_mean_are_solved_from_a_file_to_what_a_plain_layout_has_nearly(
    wide: Path, tmp_path: Path
) -> None:
    zp.gather_statistics(wide, tmp_path / "gram.safetensors", ids(), gram=True)
    floats = []
    for to in ("nf4_double", "nf4"):
        out = tmp_path / to
        zp.quantize_checkpoint(
            wide, out, to, method="gptq", statistics=tmp_path / "gram.safetensors", format="bitsandbytes"
        )
        zp.dequantize_checkpoint(out, tmp_path / f"{to}-floats", dtype="float32")
        floats.append(tensors_of(tmp_path / f"{to}-floats"))
    for name, double in floats[0].items():
        plain = floats[1][name]
        # Codes are the same ones, and scales those of eight bits.
        assert torch.equal(double == 0, plain == 0)
        assert float((double - plain).norm() / plain.norm()) < 0.01
    doubled, plain_file = (tensors_of(tmp_path / to) for to in ("nf4_double", "nf4"))
    module = "model.layers.0.mlp.down_proj.weight"
    state = json.loads(bytes(doubled[f"{module}.quant_state.bitsandbytes__nf4"].tolist()))
    assert state["nested_offset"] == pytest.approx(float(plain_file[f"{module}.absmax"].double().mean()))


def test_a_plan_of_a_quality_is_that_of_the_run_and_is_carried_out(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = zp.plan_checkpoint(source, "w4a8", quality="good", ignore="lm_head", out=file)
    assert {weight.method for weight in plan.weights} == {GOOD[1]}
    zp.quantize_checkpoint(source, tmp_path / "a", plan=file, calibration=ids())
    options = {"calibration": ids(), "ignore": "lm_head"}
    zp.quantize_checkpoint(source, tmp_path / "b", "w4a8", quality="good", **options)
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b") != {}
    with pytest.raises(zp.CalibrationError, match=r"gptq rescales channels .* pass calibration"):
        zp.quantize_checkpoint(source, tmp_path / "c", plan=file)
    with pytest.raises(zp.OptionError, match="both say how weights are quantized"):
        zp.plan_checkpoint(source, "w4a16", quality="good", method="mse")
