"""The text form of schemes, as words.

    ELEMENT[:GRANULARITY][:OPTION...]      or      PRESET[:GRANULARITY][:OPTION...]

ELEMENT is a format (``int4``, ``float8_e4m3fn``, ``e3m4``). GRANULARITY is ``tensor`` (default), ``token``,
``channel[AXIS]``, ``g<N>`` or ``block<R>x<C>``. Options:

    asym | asym=real            integer or real zero point (``asym=none`` takes a preset's away)
    scale=CHOICE                the finest scales: a format of any kind (``float32``, ``input``, ``ue4m3``,
                                ``uint6``), a rule that gives powers of two (``floor``, ``even``, ``ceil``,
                                ``rceil``, ``ceil7.25``), or ``RULE/FORMAT``, where ``signed`` divides the
                                number of largest magnitude, ``linear_up``, ``linear_late`` and
                                ``signed_late`` say how the scale is rounded: up, or once elements were
                                encoded without, ``search`` takes the scale of least squared error,
                                ``search2.4`` under another power, and ``four_over_six`` the better one of
                                two; ``signed`` and these three alone keep the format that an earlier option
                                or preset gave
    scale2=CHOICE@GRANULARITY   a coarser level; then scale3
    center=FORMAT@GRANULARITY   the mean of scales, which is subtracted before they are stored
    offset=CHOICE               a number added to each value, on the blocks of scales: the smallest of each
    offset2=CHOICE@GRANULARITY  a factor of offsets; then offset3
    cast                        no scale at all
    narrow | narrow=no          leave out the most negative integer
    round=MODE                  half_even, half_away, half_up, half_down, floor, ceil, toward_zero,
                                stochastic(SEED)
    overflow=MODE               saturate, special, error
    dialect=NAME                whose small choices to follow

A preset means its weight's scheme. A later option overrides an earlier one and a preset's own. This module
owns the words, and :class:`.scheme.Scheme` their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import SchemeError, near_misses
from .dialects import DIALECTS, Arithmetic
from .granularity import Granularity
from .presets import PRESETS
from .scale_rules import any_format, rule_named, signs

OPTIONS = (
    "asym", "scale", "scale2", "scale3", "center", "offset", "offset2", "offset3", "cast", "narrow", "round",
    "overflow", "dialect",
)  # fmt: skip
_HINTS = dict.fromkeys(("sym", "symmetric"), "leave it out, schemes are symmetric unless they say asym")
_SEPARATORS = re.compile(r"[-_,/ ]+")
"""What is written between the parts of a scheme by mistake."""
_POWERS = "float8_e8m0fnu"
"""The format of powers of two that a rule alone means."""
_SWITCHES = {"asym": "integer", "cast": "yes", "narrow": "yes"}


def words(text: str) -> dict[str, str]:
    """Return the parts of a scheme's text, with presets expanded.

    Raises SchemeError for an empty text, an unknown option, or an option without its value.

    >>> words("mxfp4_e2m1:scale=even")
    {'element': 'float4_e2m1fn', 'granularity': 'g32', 'scale': 'even'}
    """
    head, *rest = [part.strip() for part in text.strip().split(":")]
    if not head:
        raise SchemeError(
            f"scheme {text!r} is empty; write ELEMENT[:GRANULARITY][:OPTION...], for example int4:g128"
        )
    preset = PRESETS.get(head.lower())
    element_only, *glued = _SEPARATORS.split(head) if "[" not in head and preset is None else [head]
    if glued and _granularity(glued[0]) is not None:
        raise SchemeError(
            f"scheme {text!r} has its parts without colons between them; did you mean "
            f"{':'.join((element_only, *glued, *rest))}?"
        )
    element, *defaults = (head if preset is None else preset.weight).split(":")
    parts = {"element": element}
    _lay_over(parts, defaults, text)
    _lay_over(parts, rest, text)
    blocks = [part for part in rest if _granularity(part) is not None]
    if len(blocks) > 1:
        raise SchemeError(f"scheme {text!r} has two granularities, {blocks[0]} and {blocks[1]}; keep one")
    return parts


def overridden(text: str, options: str) -> str:
    """Return a scheme's text with some options replaced.

    >>> overridden("int4:g128:scale=input", "g64")
    'int4:g64:scale=input'
    """
    parts = words(text)
    if options:
        words(f"{parts['element']}:{options}")  # two granularities among them are an error
        _lay_over(parts, [part.strip() for part in options.split(":")], text)
    return join(parts)


def _lay_over(parts: dict[str, str], options: Sequence[str], text: str) -> None:
    """Override options; signed scales drop an earlier dialect that lacks them."""
    read = [_option(option, text) for option in options]
    signed = any(key == "scale" and signs(value) for key, value in read)
    dialect = DIALECTS.get(parts.get("dialect", ""))
    if signed and dialect is not None and dialect.arithmetic is Arithmetic.INPUT:
        del parts["dialect"]
    for key, value in read:
        _override(parts, key, value)


def _override(parts: dict[str, str], key: str, value: str) -> None:
    """Set an option; a rule for scales of any format keeps theirs."""
    if key == "scale" and "scale" in parts and any_format(value):
        _, slash, name = parts["scale"].rpartition("/")
        named = rule_named(parts["scale"])
        if slash or named is None:
            value = f"{value}/{name}"
        elif named.power_of_two:
            value = f"{value}/{_POWERS}"
    parts[key] = value


def _granularity(part: str) -> str | None:
    """Return the granularity that ``part`` spells, in lower case, or None."""
    return part.lower() if Granularity.parse(part.lower()) is not None else None


def _option(part: str, text: str) -> tuple[str, str]:
    blocks = _granularity(part)
    if blocks is not None:
        return "granularity", blocks
    key, equals, value = part.partition("=")
    if key not in OPTIONS:
        hint = _HINTS.get(key) or (f"did you mean g{key}?" if key.isdecimal() else near_misses(key, OPTIONS))
        raise SchemeError(f"option {part!r} of scheme {text!r} is unknown; {hint}")
    if not equals and key not in _SWITCHES:
        raise SchemeError(f"option {key!r} of scheme {text!r} needs a value, as in {key}=...")
    return key, value if equals else _SWITCHES[key]


def join(parts: Mapping[str, str]) -> str:
    """Return the text of parts: the inverse of :func:`words` without presets."""
    options = [parts["element"]]
    if "granularity" in parts:
        options.append(parts["granularity"])
    for key in OPTIONS:
        if key in parts:
            value = parts[key]
            options.append(key if _SWITCHES.get(key) == value else f"{key}={value}")
    return ":".join(options)
