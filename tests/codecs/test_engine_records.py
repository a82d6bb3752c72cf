"""What `zeropoint plan` says of vLLM is what vLLM did, in every row that was recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.written import save, weight

import zeropoint as zp
from zeropoint.checkpoint.plan.verdicts import Verdict, facts_of, verdicts
from zeropoint.codecs.engine_records import (
    BUILT_IN_FLOATS,
    LOADED,
    RAN,
    REFUSED,
    SEVERAL,
    VllmRun,
    release,
    runs,
    ways,
)
from zeropoint.codecs.engines import VLLM, Facts, Loads
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.registry import CODECS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "bert": "BertModel",
    "gpt2": "GPT2LMHeadModel", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}  # fmt: skip


def source_of(folder: Path, model_type: str) -> Path:
    """Write two blocks with the names of a kind of model, where they are not there yet."""
    if folder.exists():
        return folder
    attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names = [f"model.layers.{n}.{name}" for n in range(2) for name in attention]
    match model_type:
        case "bert":
            names = [
                f"encoder.layer.{n}.attention.self.{part}"
                for n in range(3)
                for part in ("query", "key", "value")
            ]
        case "qwen3_moe":
            names += [
                f"model.layers.0.mlp.experts.{n}.{part}_proj"
                for n in range(2)
                for part in ("gate", "up", "down")
            ]
        case "gpt2":
            names = [
                f"transformer.h.{n}.{part}"
                for n in range(2)
                for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            ]
        case "mixtral":
            names += [
                f"model.layers.0.block_sparse_moe.experts.{n}.w{part}" for n in range(2) for part in (1, 2, 3)
            ]
        case _:
            names += [
                f"model.layers.{n}.mlp.{part}_proj" for n in range(2) for part in ("gate", "up", "down")
            ]
            if model_type == "qwen3":  # the others' heads are tied
                names.append("lm_head")
    config = {
        "model_type": model_type, "architectures": [ARCHITECTURES[model_type]], "dtype": "bfloat16",
        "tie_word_embeddings": model_type != "qwen3",
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True, "moe_intermediate_size": 256,
        "n_embd": 256, "n_layer": 2, "n_head": 2,
    }  # fmt: skip
    tensors = {f"{name}.weight": weight(256, 256).bfloat16() for name in names}
    if model_type == "gpt_oss":
        experts = "model.layers.0.mlp.experts"
        tensors |= {
            f"{experts}.{part}": weight(512, 256).bfloat16().view(2, 256, 256)
            for part in ("gate_up_proj", "down_proj")
        }
    return save(folder, tensors, config)


def verdict(run: VllmRun, source: Path) -> tuple[Verdict, list[str]]:
    """Return what is said of vLLM, and the ways of the layers."""
    of = "recipe" if "default:" in run["scheme"] else "to"
    plan = zp.plan_checkpoint(source, **{of: run["scheme"]}, format=run["layout"])
    (found,) = (each for each in verdicts(plan) if each.engine == VLLM)
    return found, ways(facts_of(plan))


def test_the_verdict_agrees_with_every_row(tmp_path: Path) -> None:
    wrong = []
    for run in runs():
        found, now = verdict(run, source_of(tmp_path / run["model_type"], run["model_type"]))
        answer, _, package = run["answer"].partition(": ")
        given = f" {package}" if package else ""
        good = {
            RAN: found.loads is (Loads.PARTLY if package else Loads.YES)
            and found.reason == f"vLLM {release()} ran it on a CPU{given}"
            and found.checked,
            LOADED: found.loads is not Loads.NO
            and f"vLLM {release()} loaded its weights{given}, and has" in found.reason
            and (not package or found.loads is Loads.PARTLY),
            REFUSED: found.loads is Loads.NO,
        }[answer]
        # Mixtures of types depend on sizes, which matter only where something was read.
        if not good or (now != run["ways"] and answer != REFUSED):
            wrong.append((run, found, now))
    assert wrong == []
    assert sum(run["answer"] == RAN for run in runs()) >= 15


def test_what_nobody_tried_is_not_said_to_have_run(tmp_path: Path) -> None:
    tried = {each for run in runs() if run["answer"] == RAN for each in run["ways"]}
    assert SEVERAL in tried
    for model_type, scheme in (("gemma3_text", "int8:g64"), ("bert", "fp8_block")):
        source = source_of(tmp_path / model_type, model_type)
        found, _ = verdict(VllmRun(
            model_type=model_type, layout="compressed-tensors", scheme=scheme, ways=[], answer=RAN,
        ), source)  # fmt: skip
        assert "ran" not in found.reason.split()
        assert not found.checked


@pytest.mark.parametrize("field", ["model_type", "layout"])
def test_another_model_or_layout_has_no_answer_of_these(tmp_path: Path, field: str) -> None:
    run = next(run for run in runs() if run["answer"] == RAN and run["layout"] == "compressed-tensors")
    others = {"model_type": "olmo2", "layout": "torchao"}
    source = save(tmp_path / "x", {"model.layers.0.mlp.up_proj.weight": weight(128, 128).bfloat16()}, {
        "model_type": others["model_type"] if field == "model_type" else run["model_type"],
        "architectures": ["Olmo2ForCausalLM"],
    })  # fmt: skip
    layout = others["layout"] if field == "layout" else run["layout"]
    plan = zp.plan_checkpoint(source, "int4:g64", format=layout)
    (found,) = (each for each in verdicts(plan) if each.engine == VLLM)
    assert "ran it" not in found.reason


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [
        ("LlavaOnevisionForConditionalGeneration", "*multi_modal_projector.*"),
        ("Qwen3OmniMoeForConditionalGeneration", "*audio_tower.*"),
        ("LlavaForConditionalGeneration", None),
    ],
)
def test_a_layer_that_vllm_builds_in_floats_is_kept_and_named_where_it_is_included(
    tmp_path: Path, architecture: str, pattern: str | None
) -> None:
    names = (
        "model.multi_modal_projector.linear_1", "model.audio_tower.layers.0.self_attn.q_proj",
        "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.0.mlp.up_proj",
    )  # fmt: skip
    config = {"model_type": "llava", "architectures": [architecture], "dtype": "bfloat16"}
    source = save(tmp_path / "in", {f"{name}.weight": weight(128, 128).bfloat16() for name in names}, config)

    def planned(scheme: str = "w4a16", **options: Any) -> tuple[list[str], Verdict]:
        plan = zp.plan_checkpoint(source, scheme, **options)
        (found,) = (each for each in verdicts(plan) if each.engine == VLLM)
        return [d.entry.name for d in plan.decisions if d.reason == BUILT_IN_FLOATS], found

    kept, found = planned()
    assert (len(kept), found.loads is Loads.NO) == (pattern is not None, False)
    # vLLM does not read this layout.
    assert planned("mlx_int4", format="mlx")[0] == []
    if pattern is not None:
        kept, found = planned(include=pattern)
        assert (kept, found.loads) == ([], Loads.NO)
        assert found.reason.endswith(f"without a quantization; use ignore=['{pattern}']")
        with pytest.raises(zp.CheckpointError, match="1 linear weight would stay unquantized"):
            planned(strict=True)


@pytest.mark.parametrize(
    ("scheme", "layout", "loads"),
    [
        ("w4a16", "compressed-tensors", Loads.YES),
        ("fp8_dynamic", "compressed-tensors", Loads.YES),
        ("w4a16_asym", "awq", Loads.YES),
        ("w4a16", "gptq", Loads.YES),
        ("fp8_dynamic", "quark", Loads.NO),
        ("fp8_block", "fp8-block", Loads.NO),
    ],
)
def test_a_quantized_head_is_named_where_vllm_looks_for_it(
    tmp_path: Path, scheme: str, layout: str, loads: Loads
) -> None:
    """Of another model than the rows with a head are of, so that nobody is said to have run it."""
    names = ("lm_head", *(f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    source = save(tmp_path / "in", {f"{name}.weight": weight(128, 128).bfloat16() for name in names}, config)
    zp.quantize_checkpoint(
        source, tmp_path / "out", scheme, format=layout, include="lm_head", report=False, force=True
    )
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    if layout == "compressed-tensors":
        (group,) = section["config_groups"].values()
        assert group["targets"] == ["lm_head", "Linear"]
    elif layout in ("awq", "gptq"):
        assert section["lm_head"] is True
    plan = zp.plan_checkpoint(source, scheme, format=layout, include="lm_head")
    (found,) = (each for each in verdicts(plan) if each.engine == VLLM)
    assert found.loads is loads
    assert not found.checked
    if loads is Loads.NO:
        assert found.reason.endswith("takes no quantized head in this layout; use ignore='lm_head'")
    assert zp.verify_checkpoint(tmp_path / "out", source).ok


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("granite", "heads of queries and keys interleaved"),
        ("gemma2", "values that llama.cpp changes"),
        ("olmo3", "does not know 'olmo3'"),
        ("glm4_moe", "no experts"),
        ("qwen3", None),
        ("qwen3 in tq2_0", "has no TQ2_0"),
        ("cohere", None),
        ("gemma3_text", None),
        ("olmoe", None),
    ],
)
def test_the_plugin_for_gguf_reads_families_whose_values_are_the_models(kind: str, why: str | None) -> None:
    names = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "num_experts", "num_experts_per_tok", "n_routed_experts", "moe_intermediate_size",
    )  # fmt: skip
    sizes = dict.fromkeys(names, 8)
    codec = CODECS["gguf"]
    kind, _, scheme = kind.partition(" in ")
    facts = Facts(family={"model_type": kind, **sizes}, layers=(layer_scheme(scheme or "q8_0", codec),))
    found = [*codec.engines[VLLM](facts)]
    assert (found[0][0] is Loads.NO) == (why is not None)
    assert (why or "with the package vllm-gguf-plugin") in found[0][1]
