"""Checkpoints of torchao with one quantized weight, whose metadata say anything."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from tests.checkpoint.written import save

MODULE = "a.up_proj"


def wrapped(kind: object, data: object) -> dict[str, object]:
    """Return a value with its type, as torchao spells both."""
    return {"_type": kind, "_data": data}


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], kind: str, data: object, *, config: object
) -> Path:
    """Write tensors of a weight that the metadata call a ``kind``, under a configuration."""
    name = f"{MODULE}.weight"
    section = {"quant_method": "torchao", "quant_type": {"default": config}}
    described = {name: json.dumps(wrapped(kind, data)), "tensor_names": json.dumps([name])}
    return save(folder, tensors, {"model_type": "llama", "quantization_config": section}, **described)
