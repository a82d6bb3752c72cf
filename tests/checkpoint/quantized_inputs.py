"""Checkpoints that are quantized already, and the tools that dequantize them: those of compressed-tensors."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import tensors_of
from tests.peers import Peer

converters = Peer("compressed_tensors.entrypoints.convert")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}


def fp8_layer(
    name: str, shape: tuple[int, ...], block: tuple[int, int] = (128, 128), seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return random codes, without NaN, and factors of some spread, as a block-quantized layer has them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    factors = torch.rand(grid, generator=generator) * 2.0 ** torch.randint(-12, -4, grid, generator=generator)
    return {name: (codes | signs).view(torch.float8_e4m3fn), f"{name}_scale_inv": factors}


def to_fp8(source: Path, folder: Path) -> Path:
    """Write a checkpoint with its projections in fp8 blocks, in shards of the same names, and return it."""
    folder.mkdir()
    weight_map = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = {}
        for number, (name, tensor) in enumerate(sorted(load_file(path).items())):
            quantized = "proj" in name and tensor.ndim > 1
            tensors |= fp8_layer(name, tuple(tensor.shape), seed=number) if quantized else {name: tensor}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}, indent=2))
    return folder


def dequantized_by_others(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return every tensor of a quantized checkpoint as compressed-tensors dequantizes it."""
    tensors = tensors_of(folder)
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    if method == "fp8":
        return converters.FP8BlockDequantizer.from_pretrained(str(folder), dtype=dtype).process(tensors)
    return converters.CompressedTensorsDequantizer(folder, dtype=dtype).process(tensors)


def save_like(folder: Path, like: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write ``tensors`` in the shards of the checkpoint ``like``, with its configuration but unquantized."""
    folder.mkdir()
    weight_map = {}
    for path in sorted(like.glob("*.safetensors")):
        names = {name.replace("weight_packed", "weight") for name in load_file(path)} & tensors.keys()
        save_file({name: tensors[name] for name in names}, folder / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(sorted(names), path.name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in like.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((like / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
