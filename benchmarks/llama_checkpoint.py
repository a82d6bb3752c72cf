"""A checkpoint without a download: `python llama_checkpoint.py OUT [--params-scale small] [--layers N]`.

It has the names, shapes, dtypes and shards of a Llama of 1.1 billion parameters: 2.2 GB of bfloat16 in four
shards, each written on its own so that memory stays low. Values are normal, with rows of different spread and
eight columns that stand out, as in real models; seeded, so that every run quantizes the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Size:
    """The numbers of a Llama that determine its shapes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    shards: int
    head: int = 64

    @property
    def key_value_rows(self) -> int:
        """Rows of the key and value projections: one of eight heads, at least one."""
        return max(self.head, self.hidden_size // 8)


SIZES = {
    "full": Size(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, vocab_size=32000, shards=4),
    "small": Size(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, vocab_size=2000, shards=2),
}


def shapes(size: Size) -> list[dict[str, tuple[int, ...]]]:
    """Return name to shape for each shard: layers in equal runs, embeddings first, the head last."""
    hidden, wide, narrow = size.hidden_size, size.intermediate_size, size.key_value_rows
    linear = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(size.shards)]
    shards[0]["model.embed_tokens.weight"] = (size.vocab_size, hidden)
    each = -(-size.num_hidden_layers // size.shards)
    for layer in range(size.num_hidden_layers):
        names = {f"model.layers.{layer}.{name}.weight": shape for name, shape in linear.items()}
        shards[layer // each].update(names)
    shards[-1] |= {"model.norm.weight": (hidden,), "lm_head.weight": (size.vocab_size, hidden)}
    return shards


def values(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a weight of ``shape``; one-dimensional ones are norms, which are ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=DTYPE)
    x = torch.randn(shape, generator=generator).mul_(0.02)
    x *= torch.randn(shape[0], 1, generator=generator).mul_(0.5).exp_()
    x[:, torch.randint(0, shape[1], (8,), generator=generator)] *= 6
    return x.to(DTYPE)


def write(out: Path, size: Size) -> int:
    """Write the checkpoint into the new folder ``out``; return the bytes of its tensors."""
    out.mkdir(parents=True)
    generator, owner, total = torch.Generator().manual_seed(0), {}, 0
    for name, shard in _files(size):
        tensors = {key: values(shape, generator) for key, shape in shard.items()}
        save_file(tensors, out / name, metadata={"format": "pt"})
        owner |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": owner}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config(size), indent=1))
    return total


def _files(size: Size) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    for number, shard in enumerate(shapes(size), 1):
        yield f"model-{number:05d}-of-{size.shards:05d}.safetensors", shard


def config(size: Size) -> dict[str, object]:
    """Return config.json of a size."""
    facts = asdict(size)
    head = facts.pop("head")
    facts.pop("shards")
    return facts | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "num_attention_heads": size.hidden_size // head, "num_key_value_heads": size.key_value_rows // head,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def main() -> None:
    """Write one checkpoint."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("out", type=Path)
    parser.add_argument("--params-scale", choices=SIZES, default="full")
    parser.add_argument("--layers", type=int, help="instead of those of the scale")
    parser.add_argument("--shards", type=int, help="instead of those of the scale")
    args = parser.parse_args()
    size = SIZES[args.params_scale]
    changes = {"num_hidden_layers": args.layers, "shards": args.shards}
    total = write(args.out, replace(size, **{name: n for name, n in changes.items() if n is not None}))
    print(f"{args.out}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
