"""Checkpoints of tiny models of the families that llama.cpp runs: random weights and a trained tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.oracles.tiny_tokenizers import files
from tests.peers import transformers

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
DECODER: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama(*, seed: int = 0, layers: int = 1, **sizes: Any) -> transformers.LlamaForCausalLM:
    """Return a Llama of random float32 weights; sizes are those of its configuration."""
    defaults: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64,
    }  # fmt: skip
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**defaults, **sizes})).eval()


def llava(
    text: transformers.PretrainedConfig | None = None, *, tower: str = "CLIP", layers: int = 4
) -> transformers.LlavaForConditionalGeneration:
    """A model that reads images, too; of two layers of text unless ``text`` has others.

    tower: ``"CLIP"`` or ``"Siglip"``, of so many layers.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    kind = getattr(transformers, f"{tower}VisionConfig")
    config = transformers.LlavaConfig(
        text_config=text or transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=512),
        vision_config=kind(**sizes, num_hidden_layers=layers, image_size=28), vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def config_of(name: str, vocab_size: int, **sizes: Any) -> transformers.PretrainedConfig:
    """Return the configuration of a tiny model; sizes are those that differ from the usual ones."""
    t = transformers
    decoder = {**DECODER, "vocab_size": vocab_size}
    makes = {
        "llama": lambda: t.LlamaConfig(**decoder),
        "llama3": lambda: t.LlamaConfig(**decoder, rope_parameters=LLAMA3, tie_word_embeddings=True),
        "mistral": lambda: t.MistralConfig(**decoder, head_dim=32, sliding_window=None),
        "qwen2": lambda: t.Qwen2Config(**decoder, tie_word_embeddings=True),
        "qwen3": lambda: t.Qwen3Config(**decoder, head_dim=32),
        "mixtral": lambda: t.MixtralConfig(**decoder, num_local_experts=8, num_experts_per_tok=2),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(**decoder, **EXPERTS, shared_expert_intermediate_size=64),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**decoder, **EXPERTS, head_dim=32, norm_topk_prob=True),
        "gpt_oss": lambda: t.GptOssConfig(**decoder, num_local_experts=4, num_experts_per_tok=2),
        "gemma3": lambda: t.Gemma3TextConfig(
            **{**decoder, "num_hidden_layers": 7}, head_dim=32, query_pre_attn_scalar=32, sliding_window=16
        ),
        "gpt2": lambda: t.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=vocab_size),
        "bert": lambda: t.BertConfig(**SIZES, vocab_size=vocab_size),
    }
    config = makes[name]()
    config.update(sizes)
    return config


def tokenizer_of(name: str) -> str:
    """Return the kind of tokenizer that a tiny model gets."""
    sentencepiece = dict.fromkeys(("mistral", "mixtral", "gemma3"), "sentencepiece")
    return {"bert": "word_pieces", **sentencepiece}.get(name, "byte_level")


def write(folder: Path, name: str, *, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> torch.nn.Module:
    """Write a checkpoint of a tiny model of a family, and return the model.

    sizes: of its configuration, in place of the usual ones.
    """
    kind = tokenizer_of(name)
    made = files(kind)
    config = config_of(name, len(json.loads(made["tokenizer.json"])["model"]["vocab"]), **sizes)
    torch.manual_seed(3)
    make = transformers.BertModel if name == "bert" else transformers.AutoModelForCausalLM.from_config
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.ndim == 1 else 0.2
            parameter.add_(torch.randn_like(parameter) * scale)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    for file, data in made.items():
        (folder / file).write_bytes(data)
    return model
