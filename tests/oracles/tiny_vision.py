"""Tiny models with vision parts that become mmproj files, with random weights in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.oracles.tiny_tokenizers import files
from tests.peers import transformers

SIDE = 56
_TEXT: dict[str, Any] = {
    "vocab_size": 360, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": SIDE, "patch_size": 14,
}  # fmt: skip
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {
        "text_config": {**_TEXT, "query_pre_attn_scalar": 16}, "vision_config": _VISION,
        "mm_tokens_per_image": 4,
    }),
    "smolvlm": ("SmolVLM", {
        "text_config": {"model_type": "llama", **_TEXT}, "vision_config": _VISION, "scale_factor": 2,
    }),
    "qwen2_vl": ("Qwen2VL", {
        "text_config": _TEXT,
        "vision_config": {"depth": 3, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
    }),
    "qwen2_5_vl": ("Qwen2_5_VL", {
        "text_config": _TEXT,
        "vision_config": {
            "depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64,
            "fullatt_block_indexes": [1, 3],
        },
    }),
    "llama4": ("Llama4", {
        "text_config": {**_TEXT, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "vision_config": {
            **_VISION, "num_hidden_layers": 3, "intermediate_size": 256, "vision_output_dim": 96,
            "projector_input_dim": 96, "projector_output_dim": 96,
        },
    }),
}  # fmt: skip
"""By model type: the begin of the names of its classes, and its configuration."""
PROCESSOR = {
    "image_mean": [0.5, 0.25, 0.5], "image_std": [0.5, 0.5, 0.25], "size": {"longest_edge": SIDE},
    "image_seq_length": 4,
}  # fmt: skip


def write(folder: Path, name: str) -> Any:
    """Write a model with its processor's configuration and a tokenizer, and return it."""
    stem, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{stem}Config")(**values)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    # Published checkpoints of Gemma 3 have names of before transformers 5.
    older = {
        key.replace("vision_tower.", "vision_tower.vision_model."): value
        for key, value in load_file(path).items()
    }
    save_file(older, path, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for file, data in files("byte_level").items():
        (folder / file).write_bytes(data)
    return model.float()
