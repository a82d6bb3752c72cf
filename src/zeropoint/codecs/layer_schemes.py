"""Layer schemes of a codec from texts and recipes."""

from __future__ import annotations

import functools

from ..errors import FormatError, UnsupportedError, near_misses
from ..formats.catalog import CATALOG
from ..recipes import Activation, Assignment
from ..schemes import PRESETS, Scheme
from ..schemes.text import overridden, words
from .protocol import Codec, LayerScheme


def named_layer(codec: Codec, weight: Scheme, input: Activation | None) -> LayerScheme:  # noqa: A002
    """Return a layer's scheme, named after its preset or weight."""
    name = _preset_names(codec).get((weight, input), str(weight))
    return LayerScheme(codec=codec, name=name, weight=weight, input=input)


@functools.cache
def _preset_names(codec: Codec) -> dict[tuple[Scheme, Activation | None], str]:
    return {(layer.weight, layer.input): layer.name for layer in reversed(preset_layers(codec))}


def preset_layers(codec: Codec) -> list[LayerScheme]:
    """Return the presets of a codec that need no calibration."""
    return [layer_scheme(name, codec) for name, preset in codec.presets.items() if not preset.static]


def layer_of(assignment: Assignment, codec: Codec) -> LayerScheme:
    """Return the scheme of a layer to which a recipe gives ``assignment``.

    It is named after the preset that says the same.
    Raises UnsupportedError for what no file holds: no weight at all, outputs, and, but for some codecs,
    inputs with parameters from data.
    """
    weight, given = assignment.weight, assignment.input
    if weight is None or assignment.output is not None:
        raise UnsupportedError(
            f"({assignment}) cannot be written to a checkpoint, whose layouts hold weights and schemes of "
            "inputs; give a weight, and no output"
        )
    return named_layer(codec, weight, _held(given, codec))


def _held(given: Activation | None, codec: Codec) -> Activation | None:
    """Return the input quantization; raises UnsupportedError for scales without a place."""
    if given is not None and not given.dynamic and codec.input_names is None:
        raise UnsupportedError(
            f"input {given} has parameters from data, which have no place in {codec.title}; make it dynamic"
        )
    return given


def layer_scheme(text: str | LayerScheme, codec: Codec) -> LayerScheme:
    """Return the layer scheme of a preset or weight scheme.

    A preset means what it means everywhere, unless the codec has its own of that name. A weight scheme takes
    the codec's defaults unless it says otherwise. Raises SchemeError, FormatError or
    UnsupportedError; the latter for presets that files do not hold, with the reason.
    """
    if isinstance(text, LayerScheme):
        return text
    head, colon, options = text.strip().partition(":")
    preset = codec.presets.get(head.lower(), PRESETS.get(head.lower()))
    if preset is not None:
        if preset.output is not None:
            raise UnsupportedError(
                f"preset {head.lower()!r} is refused: its inputs and outputs need scales observed on data, "
                f"and files hold none of outputs; use {preset.without_data}, or zp.quantize_model with a "
                "calibration"
            )
        static = None if preset.input is None else Activation.of(preset.input, dynamic=not preset.static)
        return LayerScheme(
            codec=codec,
            name=head.lower() + colon + options,
            weight=Scheme.parse(overridden(preset.weight, options)),
            input=_held(static, codec),
        )
    cast = "cast" in words(text)
    taken = {key: value for key, value in codec.defaults.items() if not (cast and key == "scale")}
    defaults = "".join(f":{key}={value}" for key, value in taken.items())
    try:
        weight = Scheme.parse(overridden(f"{head}{defaults}", options))
    except FormatError as error:
        known = [*codec.presets, *PRESETS, *CATALOG]
        raise FormatError(f"{head!r} is neither a preset nor a format; {near_misses(head, known)}") from error
    return LayerScheme(codec=codec, name=str(weight), weight=weight)
