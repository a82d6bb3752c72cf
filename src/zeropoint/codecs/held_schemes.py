"""Patterns of schemes that layouts hold, and refusals of others.

The same text makes the scheme that a configuration describes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import UnsupportedError
from ..formats.torch_dtypes import storage_dtype
from ..recipes import Activation
from ..schemes import Scheme
from .block_extents import blocks
from .containers.safetensors import FILE_DTYPES, torch_name

if TYPE_CHECKING:
    from .protocol import LayerScheme

FLOAT_SCALES = ("F16", "BF16", "F32")
"""Dtypes of linear scales in most layouts."""


class SchemePattern(NamedTuple):
    """Schemes that differ in bits, groups and dtype of scales.

    text: of a scheme with ``{bits}``, ``{blocks}`` and ``{scale}`` in their places. bits: of its codes.
    scales: dtypes of its scales, in the spelling of files.

    >>> pattern = SchemePattern("int{bits}:{blocks}:scale={scale}", (4, 8))
    >>> str(pattern.scheme(4, 128, "F16"))
    'int4:g128:scale=float16'
    >>> [pattern.holds(Scheme.parse(f"int8:channel:scale={s}")) for s in ("float32", "input")]
    [True, False]
    """

    text: str
    bits: tuple[int, ...]
    scales: tuple[str, ...] = FLOAT_SCALES

    def scheme(self, bits: int, group: int, scale: str) -> Scheme:
        """Return one of the schemes.

        bits: of its codes. group: inputs of a group, 0 for whole rows. scale: dtype of its scales, in the
        spelling of files.
        """
        place = f"g{group}" if group else "channel"
        return Scheme.parse(self.text.format(bits=bits, blocks=place, scale=torch_name(scale)))

    def holds(self, weight: Scheme) -> bool:
        """Return whether a scheme is one of these."""
        rows, group = blocks(weight)
        stored = {
            FILE_DTYPES.get(storage_dtype(level.format), "") for level in weight.scales[:1] if level.format
        }
        return rows == 1 and any(
            weight.bits in self.bits and weight == self.scheme(weight.bits, group, scale)
            for scale in stored.intersection(self.scales)
        )


def require_held(
    layer: LayerScheme, tool: str, use: str, *, fits: bool, given: Activation | None = None
) -> None:
    """Raise UnsupportedError for other schemes, and for quantized inputs.

    layer: what is asked for. tool: whose layout it is, for the message. use: schemes that the layout holds,
    for the message. fits: whether it holds the scheme of the weight. given: the only quantized input that it
    holds, or None.
    """
    if not fits:
        raise UnsupportedError(f"scheme {layer.weight} is not what {tool} stores; use {use}")
    if layer.input not in (None, given):
        other = "leave out the input" if given is None else f"use {given.scheme}, or no input"
        raise UnsupportedError(f"input {layer.input} has no place in {tool}; {other}")
