"""Layers that transformers cuts or joins while it loads are written as it has them, or kept."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.architectures.shrunk import class_of
from tests.checkpoint.written import ONE, tensors_of, weight
from tests.checkpoint.written import save as written
from tests.peers import Peer

import zeropoint as zp
from zeropoint.checkpoint.model.parameter_names import file_rows
from zeropoint.checkpoint.model.running_model import whole_model
from zeropoint.checkpoint.plan.as_loaded import runs_of
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, conversion_plan, make_plan
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.plan.tensor_matrices import divided_stacks
from zeropoint.checkpoint.plan.verdicts import verdicts
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.codecs.awq import CODEC as AWQ
from zeropoint.codecs.engines import TRANSFORMERS, Loads
from zeropoint.codecs.gptq import CODEC as GPTQ
from zeropoint.codecs.protocol import Codec
from zeropoint.loaded_layers import asked_in_any_class, asked_layers, cannot_decode, conversions, cut_in_vain
from zeropoint.models.unfuse import unfused

loading = Peer("transformers.core_model_loading")
transformers = Peer("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def config(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [class_of(model_type)], **SMALL, **more}


def planned(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    of: dict[str, Any],
    scheme: str = "int4:g32",
    **more: Any,
) -> CheckpointPlan:
    return make_plan(
        open_source(written(folder, dict(tensors), of)), scheme, selection=Selection(**more), limits=ONE
    )


QKV = "nomic_bert.encoder.layers.0.attn.Wqkv"
CUT = [f"nomic_bert.layers.0.self_attn.{name}_proj" for name in "qkv"]


def test_a_weight_of_several_layers_is_written_as_each_of_them(tmp_path: Path) -> None:
    tensors = {f"{QKV}.weight": weight(192, 64), f"{QKV}.bias": torch.ones(192)}
    plan = planned(tmp_path / "in", tensors, config("nomic_bert"), "int8:g32")
    run(plan, tmp_path / "out")
    assert [w.module for w in plan.weights] == CUT
    names = set(tensors_of(tmp_path / "out"))
    assert {f"{CUT[0]}.weight_packed", f"{QKV}.bias"} <= names
    assert verify(tmp_path / "out", tmp_path / "in", limits=ONE).problems == ()
    section = json.loads(str(plan.texts["config.json"]))["quantization_config"]
    assert section["dequantize"] is True


@pytest.mark.parametrize(("codec", "scheme"), [(GPTQ, "int4:g32"), (AWQ, "int4:g32:asym")])
def test_layers_that_take_the_place_of_others_are_written_as_these(
    codec: Codec, scheme: str, tmp_path: Path
) -> None:
    tensors = {f"{QKV}.weight": weight(192, 64), f"{QKV}.bias": torch.ones(192)}
    of = config("nomic_bert")
    plan = make_plan(open_source(written(tmp_path / "in", tensors, of)), scheme, codec=codec, limits=ONE)
    run(plan, tmp_path / "out")
    assert {f"{CUT[0]}.qweight", f"{QKV}.bias"} <= set(tensors_of(tmp_path / "out"))
    assert verify(tmp_path / "out", tmp_path / "in", limits=ONE).problems == ()
    (found,) = (v for v in verdicts(plan) if v.engine == TRANSFORMERS)
    assert found.loads is Loads.PARTLY


def test_a_layer_of_a_special_class_stays_where_ordinary_ones_are_replaced(tmp_path: Path) -> None:
    vision = {"model_type": "siglip_vision_model", "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    of = {
        "model_type": "siglip", "architectures": ["SiglipModel"], "vision_config": {**SMALL, **vision},
        "text_config": {"model_type": "siglip_text_model", "intermediate_size": 64, **SMALL},
    }  # fmt: skip
    out, other = "vision_model.head.attention.out_proj", "vision_model.encoder.layers.0.mlp.fc1"
    tensors = {f"{out}.weight": weight(64, 64), f"{other}.weight": weight(128, 64)}
    source = open_source(written(tmp_path, tensors, of))
    assert [d.entry.name for d in make_plan(source, "int4:g32", codec=GPTQ, limits=ONE).unfit] == [
        f"{out}.weight"
    ]
    assert make_plan(source, "int4:g32", limits=ONE).unfit == ()


def test_rows_are_in_the_order_of_the_loader() -> None:
    of = config("kimi_k25", vision_config={"model_type": "kimi_k25_vision", "num_attention_heads": 2})
    (found,) = conversions({"vision_tower.encoder.blocks.0.wqkv.weight": (24, 8)}, of)
    queries, keys, values = (rows.flatten().tolist() for rows in found.made.values())
    assert queries == [0, 2, 1, 3, 4, 6, 5, 7]  # the halves of two heads of four, taken in turn
    assert keys == [8 + row for row in queries]
    assert values == [*range(16, 24)]


def test_joined_floats_are_written_as_the_one_that_they_become(tmp_path: Path) -> None:
    kernels = {
        f"model.layers.0.attention.{part}_conv1d.weight": weight(n, 1, 4)
        for n, part in zip((64, 32, 16), "qkv", strict=True)
    }
    tensors = {"model.layers.0.mlp.up_proj.weight": weight(64, 64)} | kernels
    of = config("bailing_hybrid", pad_token_id=0)
    run(planned(tmp_path / "in", tensors, of), tmp_path / "out")
    joined = tensors_of(tmp_path / "out")["model.layers.0.self_attn.conv1d.weight"]
    torch.testing.assert_close(joined, torch.cat([*kernels.values()]), rtol=0, atol=0)
    assert verify(tmp_path / "out", tmp_path / "in", limits=ONE).problems == ()


@pytest.mark.parametrize(
    ("model_type", "name", "scheme", "loads"),
    [
        ("molmo2", "model.transformer.blocks.0.mlp.ff_proj", "int4:g32", Loads.NO),
        ("nomic_bert", QKV, "fp8_dynamic", Loads.YES),
    ],
)
def test_names_stay_where_vllm_has_them_and_where_transformers_cuts_codes(
    model_type: str, name: str, scheme: str, loads: Loads, tmp_path: Path
) -> None:
    plan = planned(tmp_path, {f"{name}.weight": weight(192, 64)}, config(model_type), scheme)
    assert [w.module for w in plan.weights] == [name]
    (found,) = (v for v in verdicts(plan) if v.engine == TRANSFORMERS)
    assert found.loads is loads


def test_a_pattern_names_the_weight_of_the_file(tmp_path: Path) -> None:
    tensors = {f"{QKV}.weight": weight(192, 64), "nomic_bert.encoder.layers.0.mlp.fc2.weight": weight(64, 64)}
    plan = planned(tmp_path, tensors, config("nomic_bert"), ignore=("*.Wqkv",))
    kept = [d.entry.name for d in plan.decisions if not d.quantized]
    assert kept == [f"{name}.weight" for name in CUT]
    ignored = json.loads(str(plan.texts["config.json"]))["quantization_config"]["ignore"]
    assert set(CUT) <= set(ignored)


DETR: dict[str, Any] = {
    "model_type": "deformable_detr", "architectures": ["DeformableDetrModel"], "d_model": 32,
    "num_queries": 4, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "use_timm_backbone": False, "backbone": None,
    "backbone_config": {"model_type": "resnet", "depths": [1], "hidden_sizes": [32], "embedding_size": 8,
                        "out_features": ["stage1"]},
}  # fmt: skip


def test_layers_are_known_whose_weights_the_model_asks_for() -> None:
    asked = asked_layers(DETR)
    assert "encoder.layers.0.self_attn.sampling_offsets" in asked
    assert "encoder.layers.0.mlp.fc1" not in asked
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2Model"], "n_layer": 1, "n_embd": 64, "n_head": 2}
    assert asked_in_any_class(gpt2) == {"h.0.attn.c_proj", "h.0.mlp.c_proj"}
    assert not cannot_decode((), DETR)
    assert cannot_decode((), config("molmo2_text"))


FROZEN = {
    f"backbone.norm.{name}": torch.ones(64) for name in ("weight", "bias", "running_mean", "running_var")
}


@pytest.mark.parametrize(("width", "kept"), [(512, True), (64, False)])
def test_a_layer_that_is_asked_for_stays_unless_most_values_are_in_such_layers(
    width: int, kept: bool, tmp_path: Path
) -> None:
    offsets = "encoder.layers.0.self_attn.sampling_offsets"
    tensors = {f"{offsets}.weight": weight(64, 64), "encoder.layers.0.mlp.fc1.weight": weight(32, width)}
    plan = planned(tmp_path, tensors | FROZEN, DETR)
    assert [d.entry.name for d in plan.unfit] == [f"{offsets}.weight"] * kept
    assert kept == any("asks for its weight" in note for note in plan.notes)


@pytest.mark.parametrize(("codec", "scheme"), [(GPTQ, "int4:g32"), (AWQ, "int4:g32:asym")])
def test_a_layer_that_is_asked_for_stays_where_one_without_a_weight_takes_its_place(
    codec: Codec, scheme: str, tmp_path: Path
) -> None:
    """GPTBigCodeBlock asks for the weight of each ``c_proj`` below it, whatever its class is."""
    name, other = "transformer.h.0.mlp.c_proj.weight", "transformer.h.0.mlp.c_fc.weight"
    tensors, of = {name: weight(64, 64), other: weight(128, 64)}, config("gpt_bigcode", n_embd=64, n_head=2)
    source = open_source(written(tmp_path / "in", tensors, of))
    plan = make_plan(source, scheme, codec=codec, limits=ONE)
    assert [d.entry.name for d in plan.unfit] == [name]
    alone = make_plan(source, scheme, codec=codec, limits=ONE, selection=Selection(ignore=(other,)))
    for made, loads in ((plan, Loads.PARTLY), (alone, Loads.NO)):
        (verdict,) = (v for v in verdicts(made) if v.engine == TRANSFORMERS)
        assert verdict.loads is loads
    assert make_plan(source, "int4:g32", limits=ONE).unfit == ()


@pytest.mark.parametrize(
    ("codec", "scheme", "kept"), [(GPTQ, "int4:g32", True), (AWQ, "int4:g32:asym", False)]
)
def test_a_layer_that_is_called_by_a_number_stays_where_it_is_not_replaced(
    codec: Codec, scheme: str, kept: bool, tmp_path: Path
) -> None:
    """optimum 2.3 looks for layers in ``dir(module)``, where names that begin with a digit are left out."""
    name, other = "model.visual.merger.mlp.0.weight", "model.language_model.layers.0.mlp.up_proj.weight"
    tensors, of = {name: weight(128, 64), other: weight(64, 64)}, config("qwen2_5_vl")
    source = open_source(written(tmp_path / "in", tensors, of))
    plan = make_plan(source, scheme, codec=codec, limits=ONE)
    assert [d.entry.name for d in plan.unfit] == [name] * kept
    run(make_plan(source, "int4:g32:scale=float16:asym", limits=ONE), tmp_path / "codes")
    converted = conversion_plan(open_source(tmp_path / "codes"), None, codec, limits=ONE)
    (verdict,) = (v for v in verdicts(converted) if v.engine == TRANSFORMERS)
    assert (verdict.loads is Loads.NO) == kept


PROJECTOR = "model.projector.layers"


@pytest.mark.parametrize("scheme", ["int4:g32", "fp8_dynamic"])
def test_a_weight_that_is_renamed_without_its_codes_has_the_new_name(scheme: str, tmp_path: Path) -> None:
    tensors = {f"{PROJECTOR}.weight": weight(64, 64), f"{PROJECTOR}.bias": torch.ones(64)}
    run(planned(tmp_path / "in", tensors, config("unlimited_ocr"), scheme), tmp_path / "out")
    names = set(tensors_of(tmp_path / "out"))
    assert {"model.multi_modal_projector.weight_scale", f"{PROJECTOR}.bias"} <= names
    assert verify(tmp_path / "out", tmp_path / "in", limits=ONE).problems == ()
    kept = planned(tmp_path / "in", tensors | {"layers.0.w.weight": weight(64, 64)}, config("unlimited_ocr"),
                   scheme, ignore=(PROJECTOR,))  # fmt: skip
    assert f"{PROJECTOR}.weight" in {d.entry.name for d in kept.decisions if not d.quantized}


ZAMBA: dict[str, Any] = config("zamba") | {
    "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "intermediate_size": 64, "mamba_dt_rank": 8, "n_mamba_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "kept"), [("fp8_dynamic", True), ("int4:g32", False)])
def test_a_layer_that_shares_its_weight_stays_where_codes_are_not_decoded(
    scheme: str, kept: bool, tmp_path: Path
) -> None:
    shared = "model.layers.1.shared_transf.feed_forward.down_proj"
    tensors = {f"{shared}.weight": weight(64, 64), "model.layers.0.mamba.out_proj.weight": weight(64, 256)}
    plan = planned(tmp_path, tensors, ZAMBA, scheme)
    assert [d.entry.name for d in plan.unfit] == [f"{shared}.weight"] * kept
    assert kept == any("gives other layers its weight" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("name", "scheme", "said"),
    [
        ("attention.o_proj", "fp8_dynamic", "makes 'mlp.gate_proj' fails where no such layer is quantized"),
        ("mlp.weights_in", "fp8_dynamic", "not checked"),
        ("mlp.weights_in", "int4:g32", "asks for the weight of 'encoder.layer.0.mlp.gate_proj'"),
    ],
)
def test_what_no_loader_cuts_is_said_of_the_layers_of_a_plan(
    name: str, scheme: str, said: str, tmp_path: Path
) -> None:
    of = config("dinov2", use_swiglu_ffn=True)
    plan = planned(tmp_path, {f"encoder.layer.0.{name}.weight": weight(64, 64)}, of, scheme)
    (found,) = (v for v in verdicts(plan) if v.engine == TRANSFORMERS)
    assert said in found.reason


def test_patterns_of_converters_are_regular_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    row = loading.WeightConverter(
        [r"\.w_qkv\.weight"],
        [r"\.self_attn\.q_proj\.weight", r"\.self_attn\.k_proj\.weight", r"\.self_attn\.v_proj\.weight"],
        [loading.Chunk(dim=0)],
    )
    monkeypatch.setattr("zeropoint.loaded_layers.mapping_rows", lambda _: [row])
    assert cut_in_vain(["layers.0.self_attn.q_proj"], {}) is None
    assert cut_in_vain(["layers.0.self_attn.o_proj"], {}) == "self_attn.q_proj"


def test_runs_have_equal_distances() -> None:
    rows = torch.tensor([7, 5, 3, 4, 5, 9])
    assert torch.cat([run.at() for run in runs_of(rows)]).tolist() == rows.tolist()
    assert len(runs_of(torch.arange(9))) == 1


def test_experts_are_found_where_releases_squeeze_what_they_take_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = {**SMALL, "intermediate_size": 96, "num_key_value_heads": 1, "num_local_experts": 3}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**of))
    layers = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear]
    with unfused(model) as root:
        found = [(own.module, own.layer, own.index.tolist()) for own in file_rows(root, layers)]
        assert ("model.layers.0.block_sparse_moe.experts.2.w2", [*range(64)]) in [
            (module, index) for module, _, index in found
        ]
        convert = loading.SplitModulelist.convert

        def squeezed(*args: Any, **named: Any) -> dict[str, torch.Tensor]:
            return {name: x.squeeze() for name, x in convert(*args, **named).items()}

        monkeypatch.setattr(loading.SplitModulelist, "convert", squeezed)  # up to 5.19
        again = [(own.module, own.layer, own.index.tolist()) for own in file_rows(root, layers)]
    assert again == found


def test_releases_whose_operations_say_less_are_asked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[object]:
        cut = cut_in_vain(["layers.0.self_attn.q_proj"], config("gte"))
        return [
            cut,
            *(cannot_decode((), config(name)) for name in ("molmo2_text", "mixtral", "ernie4_5_vl_moe")),
        ]

    before = answers()
    for kind in (loading.ConversionOps, *loading.ConversionOps.__subclasses__()):
        if "supports_many_to_many" in vars(kind):  # from 5.20 on
            monkeypatch.delattr(kind, "supports_many_to_many")
    assert answers() == before
    assert before[1:] == [True, False, False]


_MIXTURE: dict[str, Any] = {
    **SMALL, "intermediate_size": 96, "num_key_value_heads": 1, "num_local_experts": 3,
    "num_experts_per_tok": 2,
}  # fmt: skip
STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("GraniteMoe", _MIXTURE),
    "transposed": ("Llama4", {**_MIXTURE, "intermediate_size_mlp": 96, "head_dim": 32, "moe_layers": [0]}),
    "of a size of their own": ("JetMoe", {**_MIXTURE, "kv_channels": 32}),
    "rows in turn": (
        "Inkling2",
        {
            **SMALL, "moe_intermediate_size": 64, "n_routed_experts": 3, "num_experts_per_tok": 2,
            "layer_types": ["hybrid"], "unpadded_vocab_size": 64, "max_position_embeddings": 128,
            "rel_extent": 64, "num_key_value_heads": 1, "head_dim": 32, "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1, "swa_head_dim": 32,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STACKED)
def test_single_experts_become_the_tensors_that_transformers_saves(kind: str, tmp_path: Path) -> None:
    family, sizes = STACKED[kind]
    text = "Text" if family in ("Llama4", "Inkling2") else ""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}{text}Config")(**sizes)
    )
    for parameter in model.parameters():
        if parameter.dim() == 3:
            torch.nn.init.normal_(parameter)  # some families leave them empty
    model.save_pretrained(tmp_path / "in")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "codes", "int8:channel", force=True)
    zp.dequantize_checkpoint(tmp_path / "codes", tmp_path / "out")
    before, codes, after = (tensors_of(tmp_path / folder) for folder in ("in", "codes", "out"))
    stacks = {name for name, tensor in before.items() if tensor.dim() == 3 and 3 in tensor.shape[:1]}
    assert stacks
    assert codes.keys().isdisjoint(stacks)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert (after[name] - tensor).norm() <= 0.02 * tensor.norm(), name
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "codes").ok
    of = open_source(tmp_path / "codes")
    whole = whole_model(of, ONE, "", torch.float32)
    torch.testing.assert_close(
        whole(input_ids=torch.arange(8)[None]).logits,
        type(model).from_pretrained(tmp_path / "out")(input_ids=torch.arange(8)[None]).logits,
    )


def test_a_stack_of_codes_and_wider_floats_keeps_the_bits_of_both(tmp_path: Path) -> None:
    of = {**config("granitemoe"), **_MIXTURE, "dtype": "bfloat16"}
    model = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**_MIXTURE))
    source = written(tmp_path / "in", {n: x.detach().bfloat16() for n, x in model.named_parameters()}, of)
    zp.quantize_checkpoint(source, tmp_path / "codes", "int8:channel", force=True)
    codes, place = tensors_of(tmp_path / "codes"), "model.layers.0.block_sparse_moe.experts"
    mixed = {name: x for name, x in codes.items() if not name.startswith(f"{place}.1.down_proj.")}
    mixed[f"{place}.1.down_proj.weight"] = kept = weight(64, 96) / 3
    (tmp_path / "codes" / "model.safetensors.index.json").unlink()
    save_file(mixed, tmp_path / "codes" / "model.safetensors", {"format": "pt"})
    zp.dequantize_checkpoint(tmp_path / "codes", tmp_path / "out")
    stacks = [x for x in tensors_of(tmp_path / "out").values() if x.shape == (3, 64, 96)]
    assert [x.dtype for x in stacks] == [torch.float32]
    assert torch.equal(stacks[0][1], kept)


def test_experts_of_which_one_is_missing_stay_single(tmp_path: Path) -> None:
    of = {**config("granitemoe"), **_MIXTURE}
    folder = "model.layers.0.block_sparse_moe.experts"
    shapes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    tensors = {f"{folder}.{n}.{own}.weight": weight(*shapes[own]) for n in range(3) for own in shapes}
    for left, found in ((3, 2), (2, 0)):
        some = {name: x for name, x in tensors.items() if int(name.split(".")[5]) < left}
        source = open_source(written(tmp_path / str(left), some, of))
        assert len(list(divided_stacks(source.entries, of))) == found
