"""Levels of scales and offsets: valid combinations, and their text form.

    scale  = scale_1 * scale_2 * ... + center          offset = offset_1 * offset_2 * ...

A number for each block is stored level by level: the coarsest factor is chosen from the largest numbers of
its blocks, what is left is divided by it, and so on down to the finest. How numbers are stored is thus itself
a scheme, spelled as a list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import SchemeError
from ..formats import Overflow
from .dialects import Arithmetic
from .granularity import Granularity
from .scale_rules import LINEAR, MEAN, MINIMUM, SIGNED, Ceiling, Pick, Search, Store, rule_named
from .scales import ScaleLevel, choice_text, parse_choice

if TYPE_CHECKING:
    from .scheme import Scheme

MAX_LEVELS = 3
"""Most levels of a scale or an offset; the text form names as many."""
_DEFAULTS = {"scale": LINEAR, "offset": MINIMUM, "center": MEAN}
"""What a format alone means, of the finest level."""


def chained(scheme: Scheme) -> str | None:
    """Return the name of a feature beyond positive float scales, or None."""
    found = _beyond(scheme, signed=False)
    plain = found is None and scheme.zero_point.value == "none" and _one_linear(scheme)
    return "scales of zero" if plain and scheme.dialect.small_scales.of_zeros == 0.0 else found


def beyond_factors(scheme: Scheme) -> str | None:
    """Return the name of a feature beyond signed float scales, or None.

    A plain scheme decodes as codes, less their zero points, times scales in float formats.
    """
    return _beyond(scheme, signed=True)


def _beyond(scheme: Scheme, *, signed: bool) -> str | None:
    if scheme.element.per_scale > 1:
        return "tables of blocks"
    if scheme.element.reads_sign:
        return "scales whose sign chooses elements"
    if scheme.offsets:
        return "offsets"
    if scheme.center is not None:
        return "centered scales"
    for level in scheme.scales:
        if level.picks(Pick.SIGNED) and not signed:
            return "signed scales"
        if level.stores(Store.LATE):
            return "scales that are rounded after elements were encoded"
        if not level.rule.power_of_two and not level.holds_floats:
            return f"scales of level {level}"
    if scheme.zero_point.value != "none" and not _one_linear(scheme):
        return "zero points under several levels or powers of two"
    return None


def _one_linear(scheme: Scheme) -> bool:
    return len(scheme.scales) == 1 and not scheme.scales[0].rule.power_of_two


def check_levels(scheme: Scheme) -> None:
    """Raise SchemeError for incompatible levels."""
    for name, levels in (("scales", scheme.scales), ("offsets", scheme.offsets)):
        if len(levels) > MAX_LEVELS:
            raise SchemeError(f"{name} ({len(levels)} levels) must number at most {MAX_LEVELS}")
    for level in scheme.scales:
        if level.picks(Pick.MINIMUM) or level.picks(Pick.MEAN) or rule_named(level.rule.text) is None:
            raise SchemeError(f"rule {level.rule.text} is not for scales; use linear or signed")
    for level in scheme.levels:
        if isinstance(level.rule, Ceiling):
            _check_limit(scheme, level)
    _check_search(scheme)
    _check_tables(scheme)
    edges = [level for level in scheme.levels if level.picks(Pick.EDGE)]
    single = (len(scheme.scales), len(scheme.offsets)) == (1, 1) and scheme.element.is_integer
    if edges and not (single and edges == list(scheme.scales)):
        raise SchemeError("rule edge is for one level of scales with an offset, of integers; use linear")
    if scheme.chained is None:
        return
    if scheme.dialect.arithmetic is Arithmetic.INPUT:
        raise SchemeError(
            f"dialect (={scheme.dialect.name}) rounds intermediates to the input's dtype, which is not "
            f"defined for {scheme.chained}; use another dialect"
        )
    if scheme.zero_point.value == "real":
        raise SchemeError(f"{scheme.chained} of {scheme.element_name} take no real zero point; use offset")
    if scheme.zero_point.value != "none" and scheme.offsets:
        raise SchemeError(f"offsets of {scheme.element_name} take no zero point; leave out asym or offset")
    _check_signs(scheme)
    _check_offsets(scheme)
    if scheme.center is not None and scheme.center.rule != MEAN:
        raise SchemeError(f"center (={scheme.center}) must follow rule mean, as in center=float32@tensor")
    if scheme.center is not None and scheme.scales[0].rule.power_of_two:
        raise SchemeError(
            f"scales around a center have either sign, which powers of two ({scheme.scales[0]}) have not; "
            "use linear"
        )
    for name, levels in (("scale", scheme.scales), ("offset", scheme.offsets)):
        if any(level.stores(Store.LATE) for level in levels[1:]):
            raise SchemeError(f"{name} (={levels[0]}) can be rounded late on its finest level alone")


def _check_limit(scheme: Scheme, level: ScaleLevel) -> None:
    least = 2.0**scheme.element.emax
    assert isinstance(level.rule, Ceiling)
    if level is not scheme.scales[0]:
        raise SchemeError(
            f"rule {level.rule.text} is for the finest scales alone, got {level}; use ceil there"
        )
    if not least <= level.rule.limit < 2 * least:
        raise SchemeError(
            f"rule {level.rule.text} needs a limit from {least:g} to below {2 * least:g} for elements of "
            f"{scheme.element_name}, whose largest magnitude lies there"
        )


def _check_tables(scheme: Scheme) -> None:
    """Raise SchemeError for table elements whose scales are not plain float tables."""
    if scheme.element.per_scale == 1:
        return
    plain = len(scheme.scales) == 1 and not scheme.offsets and scheme.center is None
    if not plain or scheme.scales[0].rule != LINEAR or not scheme.scales[0].holds_floats:
        raise SchemeError(
            f"{scheme.element_name} needs one level of scales in a format of floats, which are its tables, "
            f"as in {scheme.element_name}:channel:scale=float16"
        )
    if not _negative(scheme.scales[0]):
        raise SchemeError(f"tables may hold negative numbers, which {scheme.scales[0]} does not")


_SEARCHED_BITS = 8
"""Most bits of elements whose errors are searched: windows follow from all of their values."""


def _check_search(scheme: Scheme) -> None:
    """Raise SchemeError for search rules without an error to compare."""
    for level in scheme.levels[1:]:
        if isinstance(level.rule, Search):
            raise SchemeError(
                f"rule {level.rule.text} is for the finest scales alone, got {level}; use linear there"
            )
    rule = scheme.search
    if rule is None:
        return
    if scheme.chained is not None:
        raise SchemeError(f"rule {rule.text} is not for {scheme.chained}; use method mse")
    if scheme.zero_point.value == "real" or (scheme.zero_point.value == "integer" and rule.factor):
        remedy = "a symmetric scheme" if rule.factor else "asym, or method mse or hqq"
        raise SchemeError(f"rule {rule.text} takes no {scheme.zero_point.value} zero point; use {remedy}")
    if not scheme.rounding.mode.to_nearest or scheme.overflow is not Overflow.SATURATE:
        raise SchemeError(
            f"rule {rule.text} compares errors of the closest codes, and {scheme.rounding} with overflow="
            f"{scheme.overflow.value} takes others; use rounding to nearest and overflow=saturate"
        )
    if scheme.element.bits > _SEARCHED_BITS:
        raise SchemeError(
            f"rule {rule.text} is for elements of at most {_SEARCHED_BITS} bits, got {scheme.element_name}; "
            "use method mse"
        )
    level = scheme.scales[0]
    if rule.factor and (rule.power_of_two or level.format is None or level.format.bits > _SEARCHED_BITS):
        raise SchemeError(
            f"rule {rule.text} needs scales in a float format of at most {_SEARCHED_BITS} bits, got {level}"
        )


def _negative(level: ScaleLevel) -> bool:
    """Return whether the level holds negative numbers."""
    return level.format is None or level.format.min < 0


def _check_signs(scheme: Scheme) -> None:
    """Raise SchemeError for signed rules in unsigned formats."""
    for level in scheme.levels:
        if (level.picks(Pick.SIGNED) or level.picks(Pick.EDGE)) and not _negative(level):
            raise SchemeError(f"rule {level.rule.text} needs a format with negative numbers, got {level}")
    if scheme.element.reads_sign:
        if not scheme.scales or scheme.center is not None or scheme.offsets:
            raise SchemeError(f"{scheme.element_name} needs scales, without offsets or a center")
        if scheme.scales[0].picks(Pick.SIGNED) or not _negative(scheme.scales[0]):
            raise SchemeError(
                f"{scheme.element_name} needs scales of rule linear in a format with a sign, "
                f"got {scheme.scales[0]}"
            )
    signed = scheme.scales and (scheme.scales[0].picks(Pick.SIGNED) or scheme.center is not None)
    if signed and not _negative(scheme.scales[0]):
        raise SchemeError(f"scales around a center may be negative, which {scheme.scales[0]} does not hold")
    ranges = scheme.offsets or scheme.zero_point.value != "none"
    if signed and ranges and scheme.center is None:
        raise SchemeError("scales with an offset or a zero point have no sign; use rule linear")


def _check_offsets(scheme: Scheme) -> None:
    if not scheme.offsets:
        return
    first, *coarser = scheme.offsets
    low, high = scheme.ends
    if not scheme.scales or first.granularity != scheme.granularity or not 0 < high - low < math.inf:
        raise SchemeError(f"offset (={first}) needs scales on the same blocks, and elements inside float32")
    if not first.picks(Pick.MINIMUM) or first.stores(Store.UP):
        raise SchemeError(f"rule {first.rule.text} is not for offsets; use minimum or minimum_late")
    for level in coarser:
        if level.rule not in (LINEAR, SIGNED) and not level.rule.power_of_two:
            raise SchemeError(
                f"rule {level.rule.text} is not for coarse offsets; use linear, signed or a power of two"
            )
    if not _negative(first) and low < 0:
        raise SchemeError(
            f"offset (={first}) of elements with negative numbers may have either sign; use a signed format"
        )
    if not _negative(first) and not any(level.picks(Pick.SIGNED) for level in coarser):
        raise SchemeError(
            f"offset (={first}) may be negative; use a format with both signs, or a coarser level that takes "
            "the sign, as in offset2=signed/float16@tensor"
        )


def joined_levels(scheme: Scheme) -> dict[str, str]:
    """Return the words for the levels of ``scheme``: the inverse of :func:`read_levels`."""
    parts = {}
    for name, levels in (("scale", scheme.scales), ("offset", scheme.offsets)):
        for number, level in enumerate(levels, 1):
            text = str(level) if number > 1 else choice_text(level, _DEFAULTS[name])
            if number > 1 or name == "offset" or text != "float32":
                parts[f"{name}{number}" if number > 1 else name] = text
    if scheme.center is not None:
        parts["center"] = f"{choice_text(scheme.center, MEAN)}@{scheme.center.granularity}"
    return parts


def read_levels(
    parts: Mapping[str, str], granularity: Granularity, *, cast: bool
) -> dict[str, tuple[ScaleLevel, ...]]:
    """Return levels by ``scale``, ``offset`` and ``center``; a cast has no scales."""
    read: dict[str, tuple[ScaleLevel, ...]] = {"scale": (), "offset": (), "center": ()}
    for name in () if cast else ("scale", "offset"):
        text = parts.get(name, "float32" if name == "scale" else None)
        found = [] if text is None else [_level(text, granularity, name)]
        for key in (f"{name}2", f"{name}3"):
            if key in parts:
                if not found:
                    raise SchemeError(f"{key} (={parts[key]!r}) is a factor of {name}, which is missing")
                found.append(_coarse_level(key, parts[key], "scale"))
        read[name] = tuple(found)
    if "center" in parts and not cast:
        read["center"] = (_coarse_level("center", parts["center"], "center"),)
    return read


def _level(text: str, granularity: Granularity, kind: str) -> ScaleLevel:
    fmt, rule = parse_choice(text, _DEFAULTS[kind])
    return ScaleLevel(granularity=granularity, format=fmt, rule=rule)


def _coarse_level(key: str, text: str, kind: str) -> ScaleLevel:
    choice, at, blocks = text.partition("@")
    if not at:
        raise SchemeError(f"{key} (={text!r}) must say where it applies, as in {key}=float32@tensor")
    return _level(choice, granularity_of(blocks), kind)


@lru_cache(maxsize=1024)
def granularity_of(text: str) -> Granularity:
    """Return the granularity that ``text`` spells; raises SchemeError when it spells none."""
    granularity = Granularity.parse(text)
    if granularity is None:
        raise SchemeError(
            f"granularity {text!r} is unknown; known are tensor, channel, token, g<N>, block<R>x<C>"
        )
    return granularity
