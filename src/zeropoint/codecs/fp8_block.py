"""The fp8 layout of Hugging Face, in which DeepSeek-V3 is published: codes, and a factor for each block.

For the weight ``X.weight`` of shape (N, K) and blocks of r x c (all little-endian, rows one after the other;
the last blocks of an axis may be smaller):

    X.weight             F8_E4M3 [N, K]
    X.weight_scale_inv   F32 [ceil(N / r), ceil(K / c)]: the factor of each block, despite its name;
                         also BF16 or F16, or a power of two as F8_E8M0 or as U8 (exponent + 127)

One factor for the whole weight has the shape [] or [1], and vLLM's name ``X.weight_scale`` as well. Fused
experts have a third axis in front and no ``.weight`` in their names:

    X.experts.down_proj            F8_E4M3 [E, N, K]
    X.experts.down_proj_scale_inv  as above; [E, ceil(N / r), ceil(K / c)]

The configuration says ``{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [r, c] or null}``. A
value is ``code * factor`` in float32.

Source: transformers 5.23 (integrations/finegrained_fp8.py), which, unlike this module, takes whole blocks
only; compressed-tensors 0.20 (entrypoints/convert/converters/fp8block_dequantizer.py). This module opens no
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedError
from ..schemes import Scheme
from .compressed_tensors_config import DIALECT, require_plain

QUANT_METHOD = "fp8"
CODES = "F8_E4M3"
FACTORS = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of factors; U8 holds the bytes of F8_E8M0."""
_ENDINGS = ("_scale_inv", "_scale")


def weight_of(name: str) -> str | None:
    """Return the name of the weight whose factors a tensor of this name holds, or None.

    >>> weight_of("model.layers.0.mlp.up_proj.weight_scale_inv"), weight_of("m.experts.down_proj_scale_inv")
    ('model.layers.0.mlp.up_proj.weight', 'm.experts.down_proj')
    >>> weight_of("model.layers.0.mlp.up_proj.input_scale") is None
    True
    """
    for ending in _ENDINGS:
        if name.endswith(ending):
            weight = name.removesuffix(ending)
            return weight if weight.endswith(".weight") or ending == _ENDINGS[0] else None
    return None


def weight_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of the quantized weights under a ``quantization_config``, with float32 scales.

    Raises UnsupportedError for other codes, CheckpointError for a malformed block.

    >>> str(weight_scheme({"weight_block_size": [128, 128]}))
    'float8_e4m3fn:block128x128:dialect=compressed-tensors'
    """
    require_plain(config)
    codes = config.get("fmt", "e4m3")
    if codes not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"fp8 weights with fmt {codes!r} cannot be read; known is 'e4m3'")
    block = config.get("weight_block_size")
    if block is None:
        return Scheme.parse(f"float8_e4m3fn:tensor:scale=float32:dialect={DIALECT}")
    valid = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not valid:
        raise CheckpointError(
            f"weight_block_size of quantization_config is {block!r}, but must be two positive numbers; the "
            "file is damaged"
        )
    return Scheme.parse(f"float8_e4m3fn:block{block[0]}x{block[1]}:scale=float32:dialect={DIALECT}")
