"""A small Llama that AMD Quark quantizes and saves: the schemes, by name, and what writes each.

The environment with amd-quark is made by tests/oracles/more_peers.sh. Needs amd-quark and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.oracles.tiny_models import llama

CASES = (
    "int4_group", "int4_channel", "int8_channel", "int8_tensor", "int8_group", "uint4_group", "uint8_channel",
    "fp8_tensor", "fp8_channel", "mxfp4", "amdfp4", "amdfp4_g32",
)  # fmt: skip
"""Those with zero points are of float32 weights, the others of bfloat16 ones."""


def dtype_of(case: str) -> torch.dtype:
    """Return the dtype of the model of a case."""
    return torch.float32 if case.startswith("uint") else torch.bfloat16


def model(dtype: torch.dtype) -> Any:
    """Return the model, whose weights are the same everywhere."""
    found = llama()
    with torch.no_grad():
        for number, parameter in enumerate(found.parameters()):
            if parameter.ndim > 1:
                places = torch.arange(parameter.numel()) * (7919 + 2 * number) % 1009
                parameter.copy_(((places.float() - 504) / 4096).view(parameter.shape))
    return found.to(dtype)


def spec(case: str) -> Any:
    """Return Quark's specification of weights."""
    from quark.torch.quantization.config import config as quark

    groups, fixed = {"ch_axis": -1, "group_size": 32}, {"is_dynamic": False}
    made = {
        "int4_group": lambda: quark.Int4PerGroupSpec(**groups),
        "int4_channel": lambda: quark.Int4PerChannelSpec(ch_axis=0),
        "int8_channel": lambda: quark.Int8PerChannelSpec(symmetric=True, ch_axis=0),
        "int8_tensor": lambda: quark.Int8PerTensorSpec(symmetric=True),
        "int8_group": lambda: quark.Int8PerGroupSpec(symmetric=True, **groups),
        "uint4_group": lambda: quark.Uint4PerGroupSpec(**groups),
        "uint8_channel": lambda: quark.Uint8PerChannelSpec(symmetric=False, ch_axis=0, **fixed),
        "fp8_tensor": lambda: quark.FP8E4M3PerTensorSpec(**fixed),
        "fp8_channel": lambda: quark.FP8E4M3PerChannelSpec(ch_axis=0, **fixed),
        "mxfp4": lambda: quark.OCP_MXFP4Spec(ch_axis=-1, **fixed),
        "amdfp4": lambda: quark.AmdFP4Spec(ch_axis=-1, group_size=16, **fixed),
        "amdfp4_g32": lambda: quark.AmdFP4Spec(ch_axis=-1, group_size=32, **fixed),
    }
    return made[case]().to_quantization_spec()


def export(case: str, folder: Path) -> None:
    """Quantize the model and save it as Quark does."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config.config import QConfig, QLayerConfig

    config = QConfig(global_quant_config=QLayerConfig(weight=spec(case)), exclude=["lm_head"])
    quantizer = ModelQuantizer(config)
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model(dtype_of(case)), None)), str(folder))


def section(folder: Path) -> dict[str, Any]:
    """Return what the configuration of a checkpoint says of quantization."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found
