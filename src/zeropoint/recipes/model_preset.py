"""Assignment of a preset or single scheme to a linear layer."""

from __future__ import annotations

from ..errors import RecipeError, ZeropointError, near_misses
from ..schemes import PRESETS, Scheme
from ..schemes.text import overridden
from .assignment import Activation, Assignment


def model_preset(name: str) -> Assignment:
    """Return the assignment of a preset, or of a weight scheme.

    Options may follow a preset's name, for its weight. Case does not matter in a preset's name. A format
    alone is no scheme here: one scale for a whole weight is rarely meant.

    Args:
        name: a preset such as ``"w4a16"``, or a scheme for weights.

    Raises:
        RecipeError: for anything else.

    Example:
        >>> str(model_preset("w4a8").input), str(model_preset("int4:g32"))
        ('int8:token dynamic', 'weight int4:g32')
        >>> str(model_preset("w8a16:g64").weight)
        'int8:g64:scale=input:dialect=compressed-tensors'
    """
    head, _, options = name.strip().partition(":")
    preset = PRESETS.get(head.lower())
    if preset is not None:
        parts = (
            None if text is None else Activation.of(text, dynamic=not preset.static)
            for text in (preset.input, preset.output)
        )
        weight = Scheme.parse(overridden(preset.weight, options))
        return Assignment(weight=weight, input=next(parts), output=next(parts))
    if ":" in name:
        return Assignment.of(weight=name)
    try:
        Scheme.parse(name)
    except ZeropointError:
        raise RecipeError(f"preset {name!r} is unknown; {near_misses(name, PRESETS)}") from None
    raise RecipeError(
        f"scheme {name!r} does not say which values share a scale; write '{name}:channel' or '{name}:g128' "
        f"for weights, or '{name}:tensor' for one scale in all"
    )
