"""A small Llama-like checkpoint in shards, the same bytes everywhere: what golden hashes are taken of.

Needs only numpy, torch and safetensors, so that it runs in the oracle's own environment too.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, VOCABULARY = 256, 512, 2, 4, 512
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 64


def _shapes(*, moe: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "self_attn.q_proj.weight"] = (HEADS * HEAD_SIZE, HIDDEN)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_SIZE)
        shapes[prefix + "self_attn.k_proj.weight"] = (KEY_HEADS * HEAD_SIZE, HIDDEN)
        shapes[prefix + "self_attn.v_proj.weight"] = (KEY_HEADS * HEAD_SIZE, HIDDEN)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        if moe:
            shapes[prefix + "mlp.gate.weight"] = (EXPERTS, HIDDEN)
            shapes[prefix + "mlp.experts.gate_up_proj"] = (EXPERTS, 2 * INTERMEDIATE, HIDDEN)
            shapes[prefix + "mlp.experts.down_proj"] = (EXPERTS, HIDDEN, INTERMEDIATE)
        else:
            shapes[prefix + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
            shapes[prefix + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
            shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return shapes


def _values(name: str, shape: tuple[int, ...], number: int, dtype: torch.dtype) -> torch.Tensor:
    # RandomState's streams are frozen by numpy's policy (NEP 19); torch's and default_rng's may change.
    stream = np.random.RandomState(number)
    values = stream.standard_normal(shape) * 0.02
    if len(shape) > 1 and "proj" in name:
        # Rows of different size, as trained layers have, and blocks of zeros.
        values *= 2.0 ** stream.randint(-3, 3, (*shape[:-1], 1))
        values[..., 0, :] = 0.0
        values[..., 5, :128] = 0.0
    if len(shape) == 1:
        values += 1.0
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


def config(*, moe: bool, dtype: torch.dtype) -> dict[str, object]:
    """Return the config.json of the model."""
    common: dict[str, object] = {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY, "max_position_embeddings": 128, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-05, "bos_token_id": 1, "eos_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    if not moe:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTERMEDIATE}
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **common, **experts}


def write(folder: Path, *, dtype: torch.dtype = torch.bfloat16, moe: bool = False, shards: int = 3) -> Path:
    """Write the checkpoint to ``folder``, in ``shards`` files, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    weight_map = {}
    shapes = _shapes(moe=moe)
    for number, (name, shape) in enumerate(shapes.items()):
        # Three shards part the second layer's v_proj from q_proj and k_proj, which are fused with it.
        shard = number * shards // len(shapes)
        files[shard][name] = _values(name, shape, number, dtype)
        weight_map[name] = _file_name(shard, shards)
    for number, tensors in enumerate(files):
        save_file(tensors, folder / _file_name(number, shards), metadata={"format": "pt"})
    if shards > 1:
        size = sum(t.numel() * t.element_size() for tensors in files for t in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(moe=moe, dtype=dtype), indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}\n')
    return folder


def _file_name(number: int, shards: int) -> str:
    return "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
