"""Marks of quantized checkpoints of any tool: keys, files, names.

Codecs know their own; this table is about formats that are recognized, so that errors can name the tool, and
not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .containers.gguf import TYPES

CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of a quantization section in config.json: the second is what compressed-tensors wrote before 0.8, the
third is MLX's."""

TOOLS: MappingProxyType[str, str] = MappingProxyType({
    "gptq": "GPTQ (AutoGPTQ, GPTQModel)", "awq": "AWQ (AutoAWQ)", "auto-round": "AutoRound",
    "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt", "bitsandbytes": "bitsandbytes", "hqq": "HQQ",
    "torchao": "torchao", "quanto": "Quanto", "aqlm": "AQLM", "vptq": "VPTQ", "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM", "mxfp4": "gpt-oss (MXFP4)", "spqr": "SpQR", "bitnet": "BitNet",
})  # fmt: skip
"""Values of ``quant_method``, to the tool that writes them."""
TOOL_FILES: MappingProxyType[str, str] = MappingProxyType(
    {
        "hf_quant_config.json": "NVIDIA ModelOpt",
        "quantize_config.json": "GPTQ (AutoGPTQ)",
        "quant_config.json": "AWQ (AutoAWQ)",
        "quanto_qmap.json": "Quanto",
    }
)
"""Files by which tools say it where config.json does not."""

_SUFFIXES = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point",
    "weight_global_scale", "qweight", "qzeros", "quant_state", "weight_format", "absmax", "SCB",
)  # fmt: skip
_ENDINGS = ("_blocks", "_scales", "_scale_inv")

ACTIVATION_SCALES = tuple(
    f"{what}_{kind}"
    for what in ("input", "output", "activation")
    for kind in ("scale", "zero_point", "global_scale")
)
"""Last parts of the names of what belongs to a layer's quantized inputs and outputs."""
CACHE_SCALES = frozenset(
    f"{what}_{kind}" for what in "qkv" for kind in ("scale", "zero_point", "global_scale")
)
"""Scales of a quantized KV cache; they belong to attention, not to a linear layer."""

CACHE_PAIR = frozenset(("k_scale", "v_scale"))
"""Those that each attention layer has of a cache in float8."""


def has_float8_cache(config: Mapping[str, Any]) -> bool:
    """Return whether keys and values are cached in float8, per tensor.

    Args:
        config: ``quantization_config``, or the contents of another file in its place.

    >>> has_float8_cache({"kv_cache_scheme": "static"}), has_float8_cache({})
    (True, False)
    """
    found = cache_scheme(config)
    if not isinstance(found, dict):
        return found in ("static", "FP8")
    whole = found.get("strategy") in (None, "tensor") and found.get("symmetric") is not False
    return whole and (found.get("type"), found.get("num_bits"), bool(found.get("dynamic"))) == (
        "float",
        8,
        False,
    )


def is_quantized(name: str, dtype: str) -> bool:
    """Return whether a tensor's name or dtype marks quantization.

    >>> (
    ...     is_quantized("a.qweight", "I32"),
    ...     is_quantized("a.weight", "F8_E4M3"),
    ...     is_quantized("a.weight", "BF16"),
    ... )
    (True, True, False)
    """
    last = name.rpartition(".")[2]
    return (
        last in _SUFFIXES
        or (dtype in TYPES and TYPES[dtype].block > 1)
        or last.endswith(_ENDINGS)
        or dtype.startswith(("F8_", "F6_"))
        or (last == "weight" and dtype == "U32")
        or dtype == "F4"
    )


def cache_scheme(config: Mapping[str, Any]) -> object:
    """Return the cache quantization in a configuration, or None.

    Args:
        config: ``quantization_config``, or the contents of another file in its place.

    >>> cache_scheme({"quantization": {"kv_cache_quant_algo": "FP8"}}), cache_scheme({})
    ('FP8', None)
    """
    table = config.get("quantization", config)
    return table.get("kv_cache_scheme", table.get("kv_cache_quant_algo")) if isinstance(table, dict) else None
