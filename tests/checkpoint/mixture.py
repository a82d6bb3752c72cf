"""A checkpoint of very many tiny weights: a mixture of experts as large models have it, but for the sizes.

Writes files without tensors, so that 100,000 weights take seconds.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROWS, COLUMNS = 16, 128
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write(folder: Path, *, experts: int, layers: int = 61, shards: int | None = None) -> Path:
    """Write ``layers`` layers of ``experts`` experts, three weights each, and return the folder.

    shards: files of weights; one for each layer by default. Every weight has the same numbers, times a power
    of two that tells it from its neighbors.
    """
    folder.mkdir(parents=True)
    shards = layers if shards is None else shards
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = [tensor for layer in range(shard, layers, shards) for tensor in _tensors(layer, experts)]
        total += _write_shard(folder / name, names)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "tie_word_embeddings": False,
        "num_hidden_layers": layers, "n_routed_experts": experts, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def weights(*, experts: int, layers: int = 61) -> int:
    """Return how many weights are quantized by default."""
    return experts * layers * len(PROJECTIONS)


def _tensors(layer: int, experts: int) -> Iterator[str]:
    yield f"model.layers.{layer}.input_layernorm.weight"
    for expert in range(experts):
        for projection in PROJECTIONS:
            yield f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def _write_shard(path: Path, names: list[str]) -> int:
    """Write a file of bfloat16 weights and return the bytes of its tensors."""
    weight = _weight().tobytes()
    table, begin = {}, 0
    for name in names:
        shape = [COLUMNS] if name.endswith("norm.weight") else [ROWS, COLUMNS]
        size = 2 * int(np.prod(shape))
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for spec in table.values():
            size = spec["data_offsets"][1] - spec["data_offsets"][0]
            file.write(weight[:size])
    return begin


def _weight() -> np.ndarray:
    """Return the bits of a matrix of normal numbers in bfloat16."""
    stream = np.random.RandomState(0)
    values = stream.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
