"""What mlx-lm itself makes of layouts that are not its own: which it runs, and which it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.verdicts import verdicts
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.engines import Loads

mx = pytest.importorskip("mlx.core", reason="extra `slow`")
utils = pytest.importorskip("mlx_lm.utils", reason="extra `slow`")

IDS = [[1, 5, 9, 33, 2]]
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "vocab_size": 64,
}  # fmt: skip
LATENT = {
    "moe_intermediate_size": 128, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "qk_nope_head_dim": 32,
}  # fmt: skip
OSS = {
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    "intermediate_size": 128,
}  # fmt: skip


def model(folder: Path, kind: str) -> Path:
    config, causal, more = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 2}),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, LATENT),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM, OSS),
    }[kind]
    torch.manual_seed(1)
    causal(config(**{**SIZES, **more})).bfloat16().save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    rope = said["rope_parameters"]  # which mlx-lm looks for under the names of transformers 4
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    said |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def written(tmp_path: Path, kind: str, scheme: str, layout: str, **more: Any) -> tuple[Path, Loads]:
    """Return a checkpoint, and what the table of engines says of it."""
    plan = zp.plan_checkpoint(model(tmp_path / "in", kind), scheme, format=layout, **more)
    run(plan, tmp_path / "out")
    (found,) = (verdict for verdict in verdicts(plan) if verdict.engine == "mlx-lm")
    return tmp_path / "out", found.loads


def apart(folder: Path) -> float:
    """Return how far logits of mlx-lm are from those of transformers with the decoded values, relative."""
    theirs, _ = utils.load_model(folder)
    theirs.set_dtype(mx.float32)
    found = np.array(theirs(mx.array(IDS)).astype(mx.float32))
    floats = folder.parent / "floats"
    zp.convert_checkpoint(folder, floats, to="float32")
    with torch.no_grad():
        ours = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
        wanted = ours(torch.tensor(IDS)).logits.numpy()
    assert np.abs(wanted).max() > 0.3
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(("kind", "scheme", "layout", "most"), [
    # The value of code 0 is rounded to float16, as its biases are.
    ("llama", "int4:g64:asym", "awq", 2e-3),
    ("gpt_oss", "mxfp4", "gpt-oss", 2e-5),
    # It decodes to bfloat16.
    ("deepseek_v3", "fp8_block", "fp8-block", 8e-3),
])  # fmt: skip
def test_it_runs(tmp_path: Path, kind: str, scheme: str, layout: str, most: float) -> None:
    folder, said = written(tmp_path, kind, scheme, layout)
    assert said in (Loads.YES, Loads.PARTLY)
    assert apart(folder) < most


def test_it_runs_packed_integers_of_deepseek_but_for_a_layer_that_it_quantizes_anew(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    kept, said = written(
        tmp_path / "kept", "deepseek_v3", "w4a16:g32", "compressed-tensors", ignore=["*kv_b_proj*"]
    )
    assert said is Loads.PARTLY
    assert apart(kept) < 1e-5
    whole, _ = written(tmp_path, "deepseek_v3", "w4a16:g32", "compressed-tensors")
    assert apart(whole) > 1e-2


@pytest.mark.parametrize(("scheme", "layout", "message"), [
    ("nvfp4a16", "compressed-tensors", "weight_packed"), ("mxfp4a16", "compressed-tensors", "weight_packed"),
    ("w4a16:g32", "compressed-tensors", "weight_packed"), ("nvfp4a16", "modelopt", "W4A16_NVFP4"),
    ("int4:g64", "gptq", "g_idx"), ("fp8_block", "fp8-block", "weight_scale_inv"),
])  # fmt: skip
def test_it_refuses_what_the_table_says(tmp_path: Path, scheme: str, layout: str, message: str) -> None:
    folder, said = written(tmp_path, "llama", scheme, layout)
    assert said is Loads.NO
    with pytest.raises(ValueError, match=message):
        utils.load_model(folder)


def test_the_algorithm_of_modelopt_that_it_names_is_not_found_either(tmp_path: Path) -> None:
    folder, _ = written(tmp_path, "llama", "nvfp4a16", "modelopt")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weight_scale_2"):
        utils.load_model(folder)
