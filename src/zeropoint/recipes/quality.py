"""Qualities: methods by how close outputs come, from one table.

A quality is given where a method is given for all weights, and picks a method for the scheme of each. It
knows no data and no model: what a method needs is asked for where it is run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..errors import CalibrationError, OptionError, all_of, option
from ..methods import NEAREST, method_named
from ..schemes import Scheme


class Quality(enum.StrEnum):
    """Closeness of outputs to the float model, as a word."""

    FAST = "fast"
    """Without data."""
    GOOD = "good"
    """With data, and codes chosen once."""
    BEST = "best"
    """With data, and the weights of each block trained together."""


LADDER: tuple[tuple[Quality, str, str], ...] = (
    (Quality.BEST, "shift+signround", "smooth+shift+signround"),
    (Quality.GOOD, "shift+gptq", "smooth+shift+gptq"),
    (Quality.FAST, "ggml", "ggml"),
    (Quality.FAST, "mse", "mse"),
    (Quality.FAST, NEAREST, NEAREST),
)
"""The methods of each quality, of weights alone and of layers with quantized inputs, the closest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedMethod:
    """The method that a quality picks for a scheme.

    Args:
        method: its name.
        refusal: why the quality's own method is refused, where the method is from a lower quality; empty
            elsewhere.
    """

    method: str
    refusal: str = ""


def picked(quality: Quality, weight: Scheme, *, quantized_inputs: bool) -> PickedMethod:
    """Return the first method from ``quality`` down that supports a scheme.

    Args:
        quality: asked for.
        weight: the scheme.
        quantized_inputs: whether inputs of the layer are quantized, too.

    Example:
        >>> picked(Quality.GOOD, Scheme.parse("int4:g64"), quantized_inputs=False).method
        'shift+gptq'
        >>> picked(Quality.FAST, Scheme.parse("q4_k"), quantized_inputs=False).method
        'ggml'
    """
    start = next(row for row, (own, *_) in enumerate(LADDER) if own is quality)
    names = [with_inputs if quantized_inputs else alone for _, alone, with_inputs in LADDER[start:]]
    refusals = [method_named(name).refusal(weight) for name in names]
    first = refusals.index(None)
    fell = LADDER[start + first][0] is not quality
    return PickedMethod(method=names[first], refusal=str(refusals[0]).partition(";")[0] if fell else "")


def without_inputs(weight: Scheme) -> str:
    """Return the method of a weight without inputs, for any quality.

    Args:
        weight: the scheme.

    Example:
        >>> without_inputs(Scheme.parse("q4_k"))
        'ggml'
    """
    return picked(Quality.FAST, weight, quantized_inputs=False).method


def method_for(name: str, weight: Scheme, *, quantized_inputs: bool) -> str:
    """Return the method of a method's or quality's name for a scheme."""
    if name not in set(Quality):
        return name
    return picked(Quality(name), weight, quantized_inputs=quantized_inputs).method


def learns_from_data(name: str | None) -> bool:
    """Return whether a method, or a quality, needs statistics of inputs.

    Args:
        name: of a method or a quality, or None.

    Example:
        >>> learns_from_data("good"), learns_from_data("mse"), learns_from_data(None)
        (True, False, False)
    """
    if name is None:
        return False
    return name != Quality.FAST if name in set(Quality) else bool(method_named(name).needs)


def one_name(method: str | None, quality: str | None, *, has_data: bool) -> str | None:
    """Return the method or the quality that is given, or None.

    Args:
        method: name of a method.
        quality: name of a quality.
        has_data: whether there are calibration data.

    Raises:
        OptionError: for both, and for an unknown quality.
        CalibrationError: for a quality that learns from data without any.

    Example:
        >>> one_name(None, "good", has_data=True)
        'good'
    """
    if quality is None:
        return method
    if quality not in set(Quality):
        raise OptionError(f"{option('quality', quality)} must be one of {', '.join(Quality)}")
    if method is not None:
        both = all_of([option("quality", str(quality)), option("method", method)])
        raise OptionError(f"{both} both say how weights are quantized; give one of them")
    if quality != Quality.FAST and not has_data:
        data, fast = option("calibration", metavar="DATA"), option("quality", str(Quality.FAST))
        raise CalibrationError(
            f"{option('quality', str(quality))} learns from data; pass {data}, or {fast}, which needs none"
        )
    return str(quality)
