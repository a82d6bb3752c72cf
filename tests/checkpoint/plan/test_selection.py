import json
import re
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import CONFIG, LINEAR, ONE, save, weight
from tests.tables import each

from zeropoint.architectures import is_transposed, layer_type
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.selection import DEFAULT_RULES, Selection, module_of, subject_of
from zeropoint.checkpoint.plan.tensor_matrices import matrices, stacked
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.read.tensor_entries import Entries, TensorEntry
from zeropoint.checkpoint.run.advice import misfit_warnings
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, PatternError


def plan(
    folder: Path, tensors: dict[str, torch.Tensor], to: str = "int8:channel", **selection: object
) -> CheckpointPlan:
    config = selection.pop("config", CONFIG)
    source = open_source(save(folder, {LINEAR: weight(8, 32)} | tensors, config))  # type: ignore[arg-type]
    return make_plan(source, to, selection=Selection(**selection))  # type: ignore[arg-type]


def reason(made: CheckpointPlan, name: str) -> str | None:
    """Return why a tensor is kept, or None when it is quantized."""
    (decision,) = [d for d in made.decisions if d.entry.name == name]
    return None if decision.quantized else decision.reason


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.3.w1.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "encoder.layer.0.attention.self.query.weight",
        "encoder.layer.0.output.dense.weight",
        "pooler.dense.weight",
        "decoder.block.0.layer.0.SelfAttention.q.weight",
        "head_proj.weight",
    ],
)
def test_linear_weights_are_quantized(name: str, tmp_path: Path) -> None:
    assert reason(plan(tmp_path, {name: weight(8, 32)}), name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.embed_tokens.weight", "an embedding"),
        ("embeddings.word_embeddings.weight", "an embedding"),
        ("embeddings.position_embeddings.weight", "an embedding"),
        ("embeddings.token_type_embeddings.weight", "an embedding"),
        ("transformer.wte.weight", "an embedding"),
        ("transformer.wpe.weight", "an embedding"),
        ("shared.weight", "an embedding"),
        ("block.0.SelfAttention.relative_attention_bias.weight", "an embedding"),
        ("model.layers.0.input_layernorm.weight", "a norm"),
        ("model.layers.0.mlp.gate.weight", "a router"),
        ("model.layers.0.block_sparse_moe.gate.weight", "a router"),
        ("model.layers.0.mlp.router.weight", "a router"),
        ("model.layers.0.mlp.router.classifier.weight", "a router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "a router"),
        ("lm_head.weight", "a head"),
        ("classifier.weight", "a head"),
        ("classifier.out_proj.weight", "a head"),
        ("score.weight", "a head"),
        ("qa_outputs.weight", "a head"),
        ("cls.predictions.decoder.weight", "a head"),
        ("output.weight", "a head"),
    ],
)
def test_embeddings_norms_routers_and_heads_are_kept(name: str, why: str, tmp_path: Path) -> None:
    made = plan(tmp_path, {name: weight(8, 32)})
    assert reason(made, name) == why
    assert made.unfit == ()


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("a.bias", weight(32), "1-D, not a matrix"),
        ("a.norm.weight", weight(32), "1-D, not a matrix"),
        ("conv.weight", weight(4, 4, 3), "3-D, not a matrix"),
        ("a.A_log", weight(8, 32), "not named *.weight"),
        ("a.position_ids.weight", torch.arange(64).reshape(2, 32), "I64, not a float"),
        ("a.mask.weight", torch.ones(2, 32, dtype=torch.bool), "BOOL, not a float"),
        ("a.rotary.weight", torch.ones(2, 32, dtype=torch.complex64), "C64, not a float"),
        (
            "a.b.weight",
            weight(2, 32).double(),
            "float64, which no engine reads in this layout; convert it first",
        ),
    ],
)
def test_what_is_no_matrix_of_floats_is_kept(
    name: str, tensor: torch.Tensor, why: str, tmp_path: Path
) -> None:
    assert reason(plan(tmp_path, {name: tensor}), name) == why


def test_a_part_of_a_model_says_what_kind_it_is_under_any_name() -> None:
    for part in ("text_config", "decoder_config", "vision_config"):
        assert is_transposed("h.0.attn.c_attn", {"model_type": "blip-2", part: {"model_type": "gpt2"}})
    assert not is_transposed("h.0.attn.c_attn", {"model_type": "blip-2", "decoder": {"model_type": "gpt2"}})


@pytest.mark.parametrize(
    ("codec", "model_type", "model", "why"),
    [
        ("compressed-tensors", "gpt2", "GPT2LMHeadModel", "None"),
        ("compressed-tensors", "imagegpt", "ImageGPTModel", "weights of Conv1D are read in the layouts"),
        ("gptq", "imagegpt", "ImageGPTModel", "None"),
    ],
)
def test_a_transposed_weight_is_quantized_along_its_inputs_where_an_engine_reads_it(
    codec: str, model_type: str, model: str, why: str, tmp_path: Path
) -> None:
    """vLLM builds GPT-2 of Linear layers, and takes packed codes as they are."""
    name, config = "h.0.attn.c_attn.weight", {"model_type": model_type, "architectures": [model]}
    source = open_source(save(tmp_path, {LINEAR: weight(8, 32), name: weight(64, 96)}, config))
    made = make_plan(source, "int4:g32:scale=float16", codec=get_codec(codec), limits=ONE)
    shapes = {each.module: each.shape for each in made.weights}
    assert shapes.get(module_of(name)) == ((96, 64) if why == "None" else None)
    assert str(reason(made, name)).startswith(why)


def test_a_last_axis_that_the_group_does_not_divide_is_kept_and_reported(tmp_path: Path) -> None:
    made = plan(tmp_path, {"a.weight": weight(8, 48)}, "int4:g32")
    assert reason(made, "a.weight") == "last axis 48 is not a multiple of the group, 32"
    assert [d.entry.name for d in made.unfit] == ["a.weight"]
    assert any("48 is not a multiple" in note for note in made.notes)


def test_strict_makes_it_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"1 linear weight would stay unquantized: 'a.weight' \(F32, shape \[8, 48\]\)"
    ):
        plan(tmp_path, {"a.weight": weight(8, 48)}, "int4:g32", strict=True)
    assert plan(tmp_path, {"a.weight": weight(8, 48)}, "int4:g32", strict=True, ignore=("a",)).unfit == ()


@pytest.mark.parametrize(
    ("scheme", "codec"),
    [
        ("fp8_block", "compressed-tensors"),
        ("fp8_block", "fp8-block"),
        ("float8_e4m3fn:block128x128", "fp8-block"),
    ],
)
def test_inputs_must_come_in_whole_groups_as_well(scheme: str, codec: str, tmp_path: Path) -> None:
    folder = save(tmp_path, {"a.weight": weight(256, 200), LINEAR: weight(200, 256)})
    made = make_plan(open_source(folder), scheme, codec=get_codec(codec), limits=ONE)
    assert reason(made, "a.weight") == "last axis 200 is not a multiple of the group of inputs, 128"
    assert [w.module for w in made.weights] == [LINEAR.removesuffix(".weight")]


DRAFT = "a head that drafts tokens, fewer of which hold when quantized"
INDEXER = "an indexer, which engines run in floats"


@each(
    "name, why",
    [
        ("mtp.fc", DRAFT),
        ("mtp.layers.0.mlp.down_proj", DRAFT),
        ("model.mtp_layers.0.self_attn.q_proj", DRAFT),
        ("medusa_heads.1.0.linear", DRAFT),
        ("model.layers.2.eh_proj", DRAFT),
        ("model.layers.2.mlp.up_proj", DRAFT),
        ("model.layers.1.mlp.up_proj", None),
        ("model.vision.layers.2.mlp.up_proj", None),
        ("model.prompt.up_proj", None),
        ("model.layers.1.self_attn.indexer.wk", INDEXER),
        ("model.layers.1.self_attn.indexer.weights_proj", INDEXER),
        ("model.layers.1.self_attn.indexer.wq_b", None),
        ("model.layers.0.self_attn.qkv_proj.base_layer", None),
        ("model.layers.0.self_attn.qkv_proj.lora_A.vision", "a part of an adapter"),
        ("model.layers.0.self_attn.qkv_proj.lora_B.speech", "a part of an adapter"),
        ("model.layers.0.mlp.gate.base_layer", "a router"),
        ("lm_head.base_layer", "a head"),
    ],
)
def test_what_engines_never_quantize_is_kept(name: str, why: str | None) -> None:
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    kind = layer_type(name, config)
    assert (
        next((rule.reason for rule in DEFAULT_RULES if kind in rule.types and not rule.dtypes), None) == why
    )


def test_draft_heads_and_indexers_come_back_where_they_are_named(tmp_path: Path) -> None:
    names = ("mtp.fc.weight", "model.layers.0.self_attn.indexer.wk.weight")
    tensors = {name: weight(8, 32) for name in names}
    made = plan(tmp_path, tensors)
    assert [reason(made, name) for name in names] == [DRAFT, INDEXER]
    assert "mtp.fc" in json.loads(str(made.texts["config.json"]))["quantization_config"]["ignore"]
    assert [reason(plan(tmp_path, tensors, include=(name,)), name) for name in names] == [None, None]


def test_a_model_with_adapters_inside_is_a_model_and_they_stay_as_they_are(tmp_path: Path) -> None:
    base, parts = "m.qkv_proj.base_layer.weight", [f"m.qkv_proj.lora_{x}.speech.weight" for x in "AB"]
    tensors = {base: weight(24, 32), parts[0]: weight(4, 32), parts[1]: weight(24, 4)}
    made = plan(tmp_path / "model", tensors)
    assert [reason(made, name) for name in (base, *parts)] == [None, *["a part of an adapter"] * 2]
    del tensors[base]
    alone = save(tmp_path / "alone", tensors)
    with pytest.raises(CheckpointError, match="is an adapter"):
        make_plan(open_source(alone), "w8a8")
    # What PEFT saves next to an adapter, such as a new head, makes no model of it.
    saved = save(tmp_path / "saved", tensors | {"base_model.model.score.weight": weight(8, 32)})
    (saved / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is an adapter"):
        make_plan(open_source(saved), "w8a8")


@each(
    "name, rows, columns, bias, kind",
    [
        ("x_embedder", 32, 12, False, "Linear"),  # FLUX: from patches to the width of the model
        ("context_embedder", 32, 48, True, "Linear"),
        ("text_embedder", 32, 50, False, "Linear"),
        ("time_text_embed.timestep_embedder.linear_1", 32, 32, True, "Linear"),
        ("embedding_hidden_mapping_in", 32, 16, True, "Linear"),
        ("model.embed_tokens", 100, 32, False, "Embedding"),
        ("embeddings.position_embeddings", 64, 32, False, "Embedding"),
        ("embed_out_of_one_row", 32, 32, False, "Embedding"),
    ],
)
def test_what_is_called_an_embedding_is_one_where_its_shape_is_that_of_a_table(
    name: str, rows: int, columns: int, bias: bool, kind: str
) -> None:
    shapes = {"blocks.0.up_proj.weight": (64, 32), "time_embed.weight": (32, 50)}
    shapes |= {f"{name}.weight": (rows, columns)}
    shapes |= {f"{name}.bias": (rows,)} if bias else {}
    entries = Entries(
        TensorEntry(name=own, dtype="F32", shape=shape, begin=0, nbytes=0, file=Path("f"))
        for own, shape in shapes.items()
    )
    assert subject_of(entries[f"{name}.weight"], entries, {}).type == kind


def test_of_a_part_of_a_pipeline_blocks_are_quantized_but_not_their_modulations(tmp_path: Path) -> None:
    linear = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp")
    modulations = ("transformer_blocks.0.norm1.linear", "blocks.3.adaLN_modulation.1")
    outer = ("x_embedder", "proj_out", "norm_out.linear", "time_text_embed.timestep_embedder.linear_1")
    tensors = {f"{name}.weight": weight(32, 128) for name in (*linear, *modulations, *outer)}
    tensors |= {f"{name}.bias": torch.zeros(32) for name in outer}
    folder = save(tmp_path, tensors, {"_class_name": "FluxTransformer2DModel"})
    made = make_plan(open_source(folder), "w8a16")
    said = {name: reason(made, f"{name}.weight") for name in (*linear, *modulations, *outer)}
    assert said == {
        **dict.fromkeys(linear),
        **dict.fromkeys(modulations, "a modulation of a norm (AdaLN) of a diffusion model"),
        **dict.fromkeys(outer, "outside of the blocks of a diffusion model"),
    }


@pytest.mark.parametrize("pattern", ["lm_head", "lm_head.weight", "*_head", "re:lm_h.*", "re:.*head.weight$"])
def test_include_quantizes_what_is_kept_by_default(pattern: str, tmp_path: Path) -> None:
    made = plan(tmp_path, {"lm_head.weight": weight(8, 32)}, include=(pattern,))
    assert reason(made, "lm_head.weight") is None


@pytest.mark.parametrize(
    "pattern", [LINEAR, "model.layers.0.mlp.up_proj", "*up_proj", "re:.*mlp.*", "re:model"]
)
def test_ignore_keeps_and_says_by_which_pattern(pattern: str, tmp_path: Path) -> None:
    made = plan(tmp_path, {"b.weight": weight(8, 32)}, ignore=(pattern,), include=(LINEAR,))
    assert reason(made, LINEAR) == f"ignored by {pattern!r}"


def test_a_regular_expression_matches_from_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="matches no tensor"):
        plan(tmp_path, {}, ignore=("re:mlp",))


def test_a_pattern_that_matches_nothing_is_answered_with_near_misses(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pattern 'lm_haed' matches no tensor .* did you mean lm_head"):
        plan(tmp_path, {"lm_head.weight": weight(8, 32)}, ignore=("lm_haed",))
    with pytest.raises(CheckpointError, match=r"pattern 'lm_head' matches .* did you mean \*\.lm_head\?"):
        plan(tmp_path, {"language_model.lm_head.weight": weight(8, 32)}, ignore=("lm_head",))


def test_every_idle_pattern_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'aaaa', 're:bbbb'"):
        plan(tmp_path, {}, include=("aaaa",), ignore=("re:bbbb",))


def test_an_include_that_names_nothing_to_quantize_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape("'a.bias' (F32, shape [32]): 1-D, not a matrix")):
        plan(tmp_path, {"a.bias": weight(32)}, include=("*bias",))


def test_a_malformed_expression_is_an_error() -> None:
    with pytest.raises(PatternError, match=r"pattern '\(' is not a regular expression"):
        Selection(ignore=("re:(",))


def test_a_set_that_is_quantized_in_part_is_reported(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    made = plan(tmp_path, {name: weight(8, 32) for name in names}, ignore=("*v_proj",))
    assert any("engines run them as one layer" in note for note in made.notes)


def test_nothing_to_quantize_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    source = open_source(save(tmp_path, {"lm_head.weight": weight(8, 32), "a.bias": weight(8)}))
    with pytest.raises(
        CheckpointError, match=r"nothing would be quantized: all 2 tensors are kept .*1 because: a head"
    ):
        make_plan(source, "w8a8")


GATE_UP, DOWN = "m.mlp.experts.gate_up_proj", "m.mlp.experts.down_proj"


def test_fused_experts_become_a_matrix_for_each_projection_and_expert(tmp_path: Path) -> None:
    made = plan(tmp_path, {GATE_UP: weight(3, 24, 32), DOWN: weight(3, 32, 12)}, "int8:channel")
    assert [(w.module, w.shape) for w in made.weights if "experts" in w.module] == [
        (f"m.mlp.experts.{expert}.{name}", shape)
        for names in ((("down_proj", (32, 12)),), (("gate_proj", (12, 32)), ("up_proj", (12, 32))))
        for expert in range(3)
        for name, shape in names
    ]


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({GATE_UP: weight(3, 32, 40), DOWN: weight(3, 12, 32)}, "without m.mlp.experts.down_proj"),
        ({DOWN: weight(3, 32, 12)}, "without m.mlp.experts.gate_up_proj"),
        (
            {GATE_UP: weight(3, 24, 32), GATE_UP + "_bias": weight(3, 24), DOWN: weight(3, 32, 12)},
            "with a bias, which loaders do not take apart",
        ),
    ],
)
def test_fused_experts_of_another_layout_are_kept_and_reported(
    tensors: dict[str, torch.Tensor], why: str, tmp_path: Path
) -> None:
    made = plan(tmp_path, tensors)
    assert [note for note in made.notes if re.search(why, note)]
    assert "m.mlp.experts" in str(made.texts["config.json"])


def of_experts(*shapes: tuple[str, tuple[int, ...]], holder: str, width: int = 32) -> Entries:
    """Return the entries of a layer with three experts, a router and projections of the model's width."""
    found = {
        **{f"{holder}.{name}": shape for name, shape in shapes},
        f"{holder}.router.layer.weight": (3, width),
    }
    found |= {"m.self_attn.q_proj.weight": (width, width), "m.self_attn.o_proj.weight": (width, width)}
    entries = Entries(
        TensorEntry(name=name, dtype="F32", shape=shape, begin=0, nbytes=0, file=Path("f"))
        for name, shape in found.items()
    )
    return stacked(entries, {})


IN_OUT, OUT_IN = True, False
PROJECTIONS = "gate_proj up_proj down_proj"
Shapes = tuple[str, tuple[int, ...]]


@each(
    "holder, up, down, transposed, parts",
    [
        (
            "m.moe",
            [("input_linear.weight", (3, 48, 32))],
            ("output_linear.weight", (3, 32, 24)),
            OUT_IN,
            "input_linear output_linear",
        ),
        (
            "m.moe",
            [("input_linear.weight", (3, 32, 48))],
            ("output_linear.weight", (3, 24, 32)),
            IN_OUT,
            "input_linear output_linear",
        ),
        ("m.experts", [("fc1.weight", (3, 32, 48))], ("fc2.weight", (3, 24, 32)), IN_OUT, "fc1 fc2"),
        ("m.ffn", [("w1", (3, 24, 32)), ("w3", (3, 24, 32))], ("w2", (3, 32, 24)), OUT_IN, "w1 w2 w3"),
        ("m.ffn", [("w1", (3, 32, 24)), ("w3", (3, 32, 24))], ("w2", (3, 24, 32)), IN_OUT, "w1 w2 w3"),
        ("m.experts", [("up", (3, 24, 32))], ("down", (3, 32, 24)), OUT_IN, "down up"),
        (
            "m.experts",
            [("gate_up_proj", (3, 48, 32))],
            ("down_proj", (3, 32, 24)),
            OUT_IN,
            "down_proj gate_proj up_proj",
        ),
        (
            "m.experts",
            [("gate_up_proj", (3, 32, 48))],
            ("down_proj", (3, 24, 32)),
            IN_OUT,
            "down_proj gate_proj up_proj",
        ),
    ],
)
def test_experts_are_found_by_their_shapes_whatever_they_are_called(
    holder: str,
    up: list[tuple[str, tuple[int, ...]]],
    down: tuple[str, tuple[int, ...]],
    transposed: bool,
    parts: str,
) -> None:
    entries = of_experts(*up, down, holder=holder)
    stacks = {name: entries[f"{holder}.{name}"].stack for name, _ in (*up, down)}
    assert {
        stack is not None and stack.problem is None and stack.transposed for stack in stacks.values()
    } == {transposed}
    found = [m for name in stacks for m in matrices(entries[f"{holder}.{name}"])]
    own = holder if holder.endswith("experts") else f"{holder}.experts"
    assert {m.module for m in found} == {f"{own}.{e}.{part}" for e in range(3) for part in parts.split()}
    widths = {m.module.rpartition(".")[2]: m.shape for m in found}
    assert all(32 in shape for shape in widths.values())
    assert widths[down[0].removesuffix(".weight")] == (32, 24)


@each(
    "shapes",
    [
        [("conv1d.weight", (32, 1, 4))],
        [("conv1.weight", (32, 32, 3)), ("conv2.weight", (32, 32, 3))],
        [("rg_lru.input_gate_weight", (4, 8, 8)), ("rg_lru.recurrent_gate_weight", (4, 8, 8))],
        [("cls_token", (1, 1, 32)), ("position", (1, 9, 32))],
    ],
)
def test_kernels_of_convolutions_and_other_tensors_of_three_axes_are_no_experts(
    shapes: list[tuple[str, tuple[int, ...]]],
) -> None:
    entries = of_experts(*shapes, holder="m.mixer")
    assert [entry.stack for entry in entries.values() if entry.stack] == []


def test_what_is_left_of_experts_is_counted_and_named(tmp_path: Path) -> None:
    tensors = {
        "m.ffn.router.weight": weight(3, 32),
        "m.ffn.input_linear.weight": weight(3, 48, 32),
        "m.ffn.output_linear.weight": weight(3, 32, 24),
        "m.ffn.experts.mlp.v1": weight(72, 32),  # DBRX: its experts one below the other
    }
    made = plan(tmp_path, tensors, "int4:g32")
    assert [d.entry.name for d in made.unfit] == ["m.ffn.experts.mlp.v1", "m.ffn.output_linear.weight"]
    (said,) = misfit_warnings(made)
    assert "18 KiB of" in said
    assert {"m.ffn.experts", "m.ffn.output_linear"} <= set(
        json.loads(str(made.texts["config.json"]))["quantization_config"]["ignore"]
    )
    with pytest.raises(CheckpointError, match="2 linear weights would stay unquantized"):
        plan(tmp_path, tensors, "int4:g32", strict=True)


def test_layers_may_have_different_numbers_of_experts(tmp_path: Path) -> None:
    tensors = {}
    for layer, number in enumerate((3, 2)):
        tensors[f"m.layers.{layer}.mlp.experts.gate_up_proj"] = weight(number, 48, 32)
        tensors[f"m.layers.{layer}.mlp.experts.down_proj"] = weight(number, 32, 24)
    made = plan(tmp_path, tensors, config={**CONFIG, "num_experts": 3})
    assert sum(".experts." in w.module for w in made.weights) == 3 * (3 + 2)


@pytest.mark.parametrize(
    ("extra", "config", "what"),
    [
        ({}, {"quantization_config": {"quant_method": "spqr"}}, "quantization_config says 'spqr'"),
        ({}, {"compression_config": {"format": "dense"}}, "compression_config says 'unknown'"),
        ({"a.weight_scale": weight(8, 1)}, {}, "a.weight_scale"),
        ({"a.qweight": torch.zeros(4, 4, dtype=torch.int32)}, {}, "a.qweight"),
        ({"a.gate_up_proj_blocks": torch.zeros(4, 4, dtype=torch.uint8)}, {}, "a.gate_up_proj_blocks"),
        ({"a.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, {}, "F8_E4M3"),
    ],
)
def test_a_checkpoint_that_is_quantized_already_is_refused(
    extra: dict[str, torch.Tensor], config: dict[str, object], what: str, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=f"is quantized already .*{what}.*; pass the original checkpoint$"
    ):
        plan(tmp_path, extra, config=CONFIG | config)
