"""Whole-model presets: what each linear layer gets, by the name under which people know it."""

from __future__ import annotations

from types import MappingProxyType

from ..errors import RecipeError, ZeropointError, near_misses
from ..schemes import TENSOR_PRESETS, Scheme
from .assignment import Assignment

MODEL_PRESETS: MappingProxyType[str, MappingProxyType[str, str]] = MappingProxyType({
    name: MappingProxyType(parts)
    for name, parts in {
        "w8a8": {"weight": "int8:channel:narrow", "input": "int8:token dynamic"},
        "w8a8_static": {"weight": "int8:channel:narrow", "input": "uint8:tensor:asym static"},
        "w8a16": {"weight": "int8:channel:narrow"},
        "w4a16": {"weight": "int4:g128"},
        "w4a8": {"weight": "int4:g128", "input": "int8:token dynamic"},
        "fp8": {"weight": "float8_e4m3fn:channel", "input": "float8_e4m3fn:token dynamic"},
        "fp8_static": {"weight": "float8_e4m3fn:tensor", "input": "float8_e4m3fn:tensor static"},
        "nvfp4": {
            "weight": "nvfp4:dialect=compressed-tensors", "input": "nvfp4:dialect=compressed-tensors static",
        },
        "mxfp8": {"weight": "mxfp8_e4m3", "input": "mxfp8_e4m3 dynamic"},
        # Weights in 4 bits, inputs in 8: the mix that OCP MX hardware multiplies directly.
        "mxfp4_mxfp8": {"weight": "mxfp4", "input": "mxfp8_e4m3 dynamic"},
        "mxfp4": {"weight": "mxfp4", "input": "mxfp4 dynamic"},
        # Shifts in place of multiplications: one power of two for each tensor, as on embedded targets.
        "int8_power_of_two": {
            "weight": "int8:tensor:narrow:scale=rceil", "input": "int8:tensor:narrow:scale=rceil static",
            "output": "int8:tensor:narrow:scale=rceil static",
        },
    }.items()
})  # fmt: skip
"""Name to the text forms of an assignment."""


def model_preset(name: str) -> Assignment:
    """Return the assignment that a preset gives to a linear layer, or a scheme's text to its weight.

    Case does not matter in a preset's name. A format alone is no scheme here: one scale for a whole weight is
    rarely meant. Raises RecipeError for anything else.

    >>> str(model_preset("w4a8").input), str(model_preset("int4:g32"))
    ('int8:token dynamic', 'weight int4:g32')
    """
    preset = MODEL_PRESETS.get(name.lower())
    if preset is not None:
        return Assignment.of(**preset)
    if ":" in name or name in TENSOR_PRESETS:
        return Assignment.of(weight=name)
    try:
        Scheme.parse(name)
    except ZeropointError:
        known = {*MODEL_PRESETS, *TENSOR_PRESETS}
        raise RecipeError(f"preset {name!r} is unknown; {near_misses(name, known)}") from None
    raise RecipeError(
        f"scheme {name!r} does not say which numbers share a scale; write '{name}:channel' or '{name}:g128' "
        f"for weights, or '{name}:tensor' for one scale in all"
    )
