"""The quant_state of a bitsandbytes weight: JSON in a tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError

BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
"""The sizes of blocks that bitsandbytes has on every device."""
NESTED_BLOCK = 256
_NUMBER_BYTES = 24
"""No number of float32 is longer in JSON."""
_DTYPES = MappingProxyType(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForm:
    """Properties of a stored weight that differ from written ones.

    length: bytes of the JSON, or None for that which it is written in. offset: what double quantization adds
    to each absmax, or None without it.
    """

    length: int | None
    offset: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantState:
    """State in the JSON of a weight.

    >>> state_of(state_text("nf4", 64, torch.bfloat16, (2, 64)), "nf4").shape
    (2, 64)
    """

    block: int
    dtype: torch.dtype
    shape: tuple[int, int]
    form: StateForm


def state_text(
    kind: str, block: int, dtype: torch.dtype, shape: tuple[int, ...], offset: float | None = None
) -> bytes:
    """Return bitsandbytes' JSON of a weight, padded with spaces for offsets."""
    name = str(dtype).removeprefix("torch.")
    state = {"quant_type": kind, "blocksize": block, "dtype": name, "shape": list(shape)}
    if offset is None:
        return json.dumps(state).encode()
    more = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    return (json.dumps(state | more) + " " * (_NUMBER_BYTES - len(json.dumps(offset)))).encode()


def state_of(text: bytes, kind: str) -> QuantState:
    """Return the state in the JSON of a weight of ``kind``.

    Raises CheckpointError for a damaged one, UnsupportedError for blocks and second levels that are not read.
    """
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its quant_state is no JSON: {error!s:.80}; the file is damaged") from error
    if not isinstance(state, dict):
        raise CheckpointError("its quant_state is no JSON object; the file is damaged")
    if state.get("quant_type") != kind:
        raise CheckpointError(
            f"quant_type of its quant_state is {state.get('quant_type')!r:.40}, but the tensor's name says "
            f"{kind!r}"
        )
    shape, dtype, block = state.get("shape"), state.get("dtype"), state.get("blocksize")
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape) or len(shape) != 2:
        raise CheckpointError(
            f"shape of its quant_state is {shape!r:.40}, but must be two positive numbers, of a matrix"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(
            f"dtype of its quant_state is {dtype!r:.40}, but must be one of {', '.join(_DTYPES)}"
        )
    if type(block) is not int or block not in BLOCKS:
        raise UnsupportedError(
            f"blocksize of its quant_state is {block!r:.40}, which is not read; known are "
            f"{', '.join(map(str, BLOCKS))}"
        )
    form = StateForm(length=len(text), offset=_offset(state))
    return QuantState(block=block, dtype=_DTYPES[dtype], shape=(shape[0], shape[1]), form=form)


def _offset(state: Mapping[str, Any]) -> float | None:
    """Return the offset of double quantization, or None without it."""
    if not any(key.startswith("nested_") for key in state):
        return None
    offset = state.get("nested_offset")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise CheckpointError(f"nested_offset of its quant_state is {offset!r:.40}, but must be a number")
    if (state.get("nested_blocksize"), state.get("nested_dtype")) != (NESTED_BLOCK, "float32"):
        raise UnsupportedError(
            f"double quantization with nested_blocksize {state.get('nested_blocksize')!r:.40} and "
            f"nested_dtype {state.get('nested_dtype')!r:.40} is not read; known are 256 and 'float32'"
        )
    return offset
