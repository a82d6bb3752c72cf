"""A small Llama on disk, for tests that need a whole checkpoint."""

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HIDDEN, INNER, VOCABULARY = 128, 256, 64


def write_llama(folder: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """Write a Llama with ``layers`` layers of random bfloat16 weights and return its directory."""
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.05).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = weight(HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}.mlp.{name}.weight"] = weight(INNER, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = weight(HIDDEN, INNER)
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_hard_llama(folder: Path) -> Path:
    """Write a Llama in some of whose weights each 16th column is larger, in each by another factor."""
    model = write_llama(folder)
    tensors = load_file(model / "model.safetensors")
    hard = [f"model.layers.1.self_attn.{which}_proj.weight" for which in "qo"]
    hard += [
        f"model.layers.{n}.mlp.{which}_proj.weight" for n, which in itertools.product((0, 1), ("up", "down"))
    ]
    for number, name in enumerate(hard):
        tensors[name][:, ::16] *= 4.0 + number
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model
