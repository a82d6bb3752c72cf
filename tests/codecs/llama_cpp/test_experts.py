"""Models with experts as GGUF files: what their tensors hold, and the same model back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import save

import zeropoint as zp
from zeropoint.checkpoint.model.importance import with_importance
from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan, make_plan
from zeropoint.checkpoint.plan.recipe import KEEP, RecipeText
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import DEFAULT, get_codec
from zeropoint.errors import CheckpointError, UnsupportedError

gguf = pytest.importorskip("gguf", reason="extra `gguf`")

GGUF = get_codec("gguf")
EXPERTS, HIDDEN, INNER = 3, 64, 32
CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_hidden_layers": 1,
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "vocab_size": 40,
    "shared_expert_intermediate_size": INNER, "torch_dtype": "float32",
}  # fmt: skip
LAYER = "model.layers.0."
MATRICES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def model() -> dict[str, torch.Tensor]:
    """Return the tensors of a model of one layer."""
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens": (40, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (40, HIDDEN),
        **dict.fromkeys((f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm"), (HIDDEN,)),
        **dict.fromkeys((f"{LAYER}self_attn.{name}_proj" for name in "qkvo"), (HIDDEN, HIDDEN)),
        f"{LAYER}mlp.gate": (EXPERTS, HIDDEN), f"{LAYER}mlp.shared_expert_gate": (1, HIDDEN),
        **{f"{LAYER}mlp.shared_expert.{name}": shape for name, shape in MATRICES.items()},
        **{
            f"{LAYER}mlp.experts.{expert}.{name}": shape
            for expert in range(EXPERTS)
            for name, shape in MATRICES.items()
        },
    }  # fmt: skip
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same model with all experts in two tensors."""
    stem = f"{LAYER}mlp.experts."
    left = {name: value for name, value in tensors.items() if not name.startswith(stem)}
    of = [{name: tensors[f"{stem}{expert}.{name}.weight"] for name in MATRICES} for expert in range(EXPERTS)]
    left[f"{stem}gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in of])
    return {**left, f"{stem}down_proj": torch.stack([e["down_proj"] for e in of])}


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    return save(folder, tensors, {**CONFIG, **config})


def converted(source: Path, out: Path, **wanted: object) -> Path:
    selection = Selection(dequantize=DequantizePolicy.EVERY, floats="F32")
    run(make_plan(open_source(source), KEEP, selection=selection, **wanted), out)  # type: ignore[arg-type]
    return out


def test_experts_of_a_layer_are_one_tensor_and_come_back(tmp_path: Path) -> None:
    tensors = model()
    source = checkpoint(tmp_path / "in", tensors)
    run(make_plan(open_source(source), "q8_0", codec=GGUF), tmp_path / "out")
    path = tmp_path / "out" / "model.gguf"
    assert zp.verify_checkpoint(tmp_path / "out", source).problems == ()
    reader = gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    for name, stored in zip(MATRICES, ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), strict=True):
        tensor = theirs[f"blk.0.{stored}.weight"]
        assert tensor.tensor_type.name == "Q8_0"
        assert tensor.shape.tolist() == [*MATRICES[name][::-1], EXPERTS]
        whole = torch.stack([tensors[f"{LAYER}mlp.experts.{e}.{name}.weight"] for e in range(EXPERTS)])
        expected = gguf.quants.quantize(whole.numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(np.asarray(tensor.data), expected)
    assert theirs["blk.0.ffn_gate_inp_shexp.weight"].shape.tolist() == [HIDDEN, 1]
    assert theirs["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"
    said = {key: field.contents() for key, field in reader.fields.items() if ".expert_" in key}
    assert said == {
        "qwen2moe.expert_count": EXPERTS, "qwen2moe.expert_used_count": 2,
        "qwen2moe.expert_feed_forward_length": INNER, "qwen2moe.expert_shared_feed_forward_length": INNER,
    }  # fmt: skip
    back = load_file(converted(path, tmp_path / "back", codec=DEFAULT) / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in back.items()} == {
        name: tuple(value.shape) for name, value in tensors.items()
    }
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
        assert config[key] == CONFIG.get(key, False)
    gate = f"{LAYER}mlp.experts.1.gate_proj.weight"
    parts = gguf.quants.dequantize(
        np.asarray(theirs["blk.0.ffn_gate_exps.weight"].data), gguf.GGMLQuantizationType.Q8_0
    )
    assert np.array_equal(back[gate].numpy(), parts[1])
    for name in ("mlp.gate", "mlp.shared_expert_gate"):
        assert torch.equal(back[f"{LAYER}{name}.weight"], tensors[f"{LAYER}{name}.weight"])


def test_experts_in_one_tensor_of_the_source_give_the_same_file(tmp_path: Path) -> None:
    apart, together = checkpoint(tmp_path / "a", model()), checkpoint(tmp_path / "b", fused(model()))
    files = []
    for source in (apart, together):
        run(make_plan(open_source(source), "q4_0", codec=GGUF), tmp_path / f"{source.name}-out")
        reader = gguf.GGUFReader(tmp_path / f"{source.name}-out" / "model.gguf")
        files.append({each.name: np.asarray(each.data).tobytes() for each in reader.tensors})
    assert files[0] == files[1]
    assert zp.verify_checkpoint(tmp_path / "b-out", together).problems == ()
    selection = Selection(ignore=("*gate_proj", "*up_proj"))  # which are pieces of one tensor of the source
    run(make_plan(open_source(together), "q4_0", codec=GGUF, selection=selection), tmp_path / "kept")
    kept = {each.name: each for each in gguf.GGUFReader(tmp_path / "kept" / "model.gguf").tensors}
    gate = torch.stack([model()[f"{LAYER}mlp.experts.{e}.gate_proj.weight"] for e in range(EXPERTS)])
    assert np.array_equal(np.asarray(kept["blk.0.ffn_gate_exps.weight"].data), gate.numpy())


def test_a_file_with_experts_is_itself_again_and_other_layouts_take_them_apart(tmp_path: Path) -> None:
    run(make_plan(open_source(checkpoint(tmp_path / "in", model())), "q8_0", codec=GGUF), tmp_path / "out")
    path = tmp_path / "out" / "model.gguf"
    for codec in (GGUF, DEFAULT):
        run(conversion_plan(open_source(path), None, codec), tmp_path / codec.name)
    assert (tmp_path / "gguf" / "model.gguf").read_bytes() == path.read_bytes()
    names = load_file(tmp_path / DEFAULT.name / "model.safetensors")
    assert f"{LAYER}mlp.experts.2.down_proj.weight_scale" in names
    first, second = (
        load_file(converted(each, tmp_path / f"floats{at}", codec=DEFAULT) / "model.safetensors")
        for at, each in enumerate((path, tmp_path / DEFAULT.name))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": EXPERTS + 1}, "holds 4 experts, and 3 is not in the checkpoint; download it again"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True in config.json, but llama.cpp computes models of"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\] in config.json, but llama.cpp"),
        ({"num_experts": 2}, "experts.2.down_proj.weight' has no name in GGUF files of qwen2moe"),
    ],
)
def test_what_llama_cpp_would_not_run_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path / "in", model(), **change)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        make_plan(open_source(source), "q8_0", codec=GGUF)


def test_experts_of_a_layer_have_one_type(tmp_path: Path) -> None:
    source = open_source(checkpoint(tmp_path / "in", model()))
    selection = Selection(ignore=("*experts.1.up_proj",))
    with pytest.raises(CheckpointError, match=r"3 experts in one type, but they would be F32 and Q8_0; give"):
        make_plan(source, "q8_0", codec=GGUF, selection=selection)
    selection = Selection(ignore=("re:.*experts.*up_proj.*",))  # all of them is well
    run(make_plan(source, "q8_0", codec=GGUF, selection=selection), tmp_path / "out")
    kept = next(
        each for each in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors if "up_exps" in each.name
    )
    assert kept.tensor_type.name == "F32"
    assert np.array_equal(np.asarray(kept.data)[2], model()[f"{LAYER}mlp.experts.2.up_proj.weight"].numpy())


def test_an_importance_matrix_has_numbers_of_each_expert(tmp_path: Path) -> None:
    numbers = np.arange(EXPERTS * HIDDEN, dtype=np.float32) + 1
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "imatrix")
    writer.add_tensor("blk.0.ffn_up_exps.weight.in_sum2", numbers.reshape(EXPERTS, HIDDEN))
    writer.add_tensor("blk.0.ffn_up_exps.weight.counts", np.ones((EXPERTS, 1), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    source = open_source(checkpoint(tmp_path / "in", model()))
    plan, missing = with_importance(
        make_plan(source, RecipeText.of("q4_0").by("ggml"), codec=GGUF), tmp_path / "imatrix.gguf"
    )
    found = {
        int(re.findall(r"\d+", name)[1]): kinds["mean_square"] for name, kinds in plan.statistics.items()
    }
    assert sorted(found) == list(range(EXPERTS))
    assert torch.equal(found[2].state["squares"], torch.from_numpy(numbers[2 * HIDDEN :]).double())  # type: ignore[attr-defined]
    assert f"{LAYER}mlp.experts.0.gate_proj" in missing
