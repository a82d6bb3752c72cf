"""The codecs by name. Whoever writes or reads quantized checkpoints finds them here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import UnsupportedError
from .compressed_tensors import CODEC as COMPRESSED_TENSORS
from .fp8_block import CODEC as FP8_BLOCK
from .gguf import CODEC as GGUF
from .gptq import CODEC as GPTQ
from .protocol import Codec

CODECS: MappingProxyType[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (COMPRESSED_TENSORS, FP8_BLOCK, GPTQ, GGUF)}
)
"""Name to codec; the first is the one that is written where nobody asks for another."""
DEFAULT: Codec = COMPRESSED_TENSORS


def get_codec(name: str) -> Codec:
    """Return the codec called ``name``; raises UnsupportedError with those that there are."""
    if name not in CODECS:
        raise UnsupportedError(f"format {name!r} is unknown; known are {', '.join(CODECS)}")
    return CODECS[name]


def claiming(quantization: Mapping[str, Any]) -> Codec | None:
    """Return the codec whose checkpoints have this ``quantization_config``, or None.

    >>> claiming({"quant_method": "fp8"}).name
    'fp8-block'
    """
    return next((codec for codec in CODECS.values() if codec.claims(quantization)), None)


def methods() -> list[str]:
    """Return the values of ``quant_method`` that are read."""
    return [method for codec in CODECS.values() for method in codec.methods]
