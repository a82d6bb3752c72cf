"""Pages of formats and presets, derived from the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import FormatError, near_misses, option
from ..formats import ALIASES, CATALOG, SOURCES, Format, get_format
from ..formats.catalog import format_name
from ..formats.exact import Number, Special
from ..formats.torch_dtypes import dtype_of
from ..schemes import PRESETS, Scheme
from .table_layout import grid, keyed, plain
from .wording import exact, short_scheme

MOST_LISTED_BITS = 8
"""Formats of at most so many bits have all their values on their page."""
_A_MATRIX = (4096, 4096)
_SHOWN_INTEGERS = (2, 4, 8, 16, 32)


def formats_document() -> dict[str, Any]:
    """Return all named formats, without their values, and all presets."""
    return {
        "formats": [facts_of_format(name, fmt) for name, fmt in CATALOG.items()],
        "presets": [_preset(name) for name in PRESETS],
    }


def page_document(name: str) -> dict[str, Any]:
    """Return every fact of a format, preset or scheme.

    Raises FormatError, with the closest names, when ``name`` is none of these, SchemeError for a scheme that
    has no meaning.

    >>> page_document("e4m3")["name"], page_document("w4a16")["kind"]
    ('float8_e4m3fn', 'preset')
    """
    key = name.strip().lower()
    if key not in CATALOG and key in PRESETS:
        return _preset(key)
    if ":" in key:
        return parts_of_scheme(Scheme.parse(key))
    try:
        fmt = get_format(name)
    except FormatError as error:
        if not key.isidentifier():
            raise
        known = (*CATALOG, *ALIASES, *PRESETS)
        near = near_misses(name, known)
        remedy = near if near.endswith("?") else "zeropoint formats lists all"
        raise FormatError(f"format {name!r} is unknown; {remedy}") from error
    facts = facts_of_format(format_name(fmt), fmt)
    if fmt.bits <= MOST_LISTED_BITS and fmt.per_scale == 1:
        several = [list(map(_json_number, fmt.numbers(code))) for code in range(fmt.code_count)]
        facts["values"] = several if fmt.per_code > 1 else [value for (value,) in several]
    return facts


def formats_table() -> RenderableType:
    """Return the tables of formats and presets."""
    table = plain(
        "format", "bits", "largest", "smallest", "special", "also called", numbers=(1, 2, 3), whole=(0,)
    )
    for name, fmt in CATALOG.items():
        if not fmt.is_whole or fmt.bits in _SHOWN_INTEGERS:
            table.add_row(
                name, str(fmt.bits), exact(fmt.max), exact(fmt.smallest), _special(fmt), _aliases(name)
            )
    layers = plain("preset", "weights", "inputs", whole=(0,))
    for name, preset in PRESETS.items():
        given = short_scheme(preset.input or "as they are")
        layers.add_row(name, short_scheme(preset.weight), f"{given}, calibrated" if preset.static else given)
    return Group(
        table,
        Text("Integers of every width from 2 to 16 bits have a name. `zeropoint formats NAME` shows one.\n"),
        layers,
        Text(
            f"Any scheme can follow {option('to')}: int4:g64, int8:channel, float8_e4m3fn:tensor, "
            "mxfp4 and others."
        ),
    )


def page_table(name: str) -> RenderableType:
    """Return the page of a name; raises as :func:`page_document` does."""
    document = page_document(name)
    if "bits" not in document:
        return keyed((k.replace("_", " "), in_words(v)) for k, v in document.items() if v is not None)
    fmt = get_format(name)
    facts = keyed(facts_in_words(document, fmt))
    if fmt.bits > MOST_LISTED_BITS or fmt.per_scale > 1:
        return facts
    digits = -(-fmt.bits // 4)
    cells = [
        f"0x{code:0{digits}X} {' '.join(map(number_text, fmt.numbers(code)))}"
        for code in range(fmt.code_count)
    ]
    return Group(facts, Text(), grid(cells))


def facts_of_format(name: str, fmt: Format) -> dict[str, Any]:
    """Return the facts of a format, except its values."""
    dtype = dtype_of(fmt)
    facts: dict[str, Any] = {
        "name": name,
        "kind": fmt.kind,
        "aliases": [alias for alias, target in ALIASES.items() if target == name],
        "spelling": fmt.spelling,
        "source": SOURCES.get(name),
        "bits": fmt.bits,
        "codes": fmt.code_count,
        "largest": float(fmt.max),
        "lowest": float(fmt.min),
        "smallest_positive": float(fmt.smallest),
        "largest_exponent": fmt.emax,
        "torch_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }
    return facts | fmt.facts


_NUMBERS = ("largest", "lowest", "smallest_positive", "smallest_normal", "step")


def facts_in_words(document: dict[str, Any], fmt: Format) -> Iterator[tuple[str, str]]:
    """Yield the facts of a format in words, absent ones omitted."""
    for key, value in document.items():
        if value is None or value == [] or key == "values":
            continue
        if key == "spelling" and fmt.is_table:  # it repeats all values
            continue
        text = str(value)
        if key in _NUMBERS:
            text = exact(Fraction(value))
        elif key.endswith("_code"):
            text = f"0x{value:0{-(-fmt.bits // 4)}X}"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, list):
            text = ", ".join(value)
        yield key.replace("_", " "), text


def _preset(name: str) -> dict[str, Any]:
    preset = PRESETS[name]
    return {
        "name": name,
        "kind": "preset",
        "weight": preset.weight,
        "input": preset.input,
        "output": preset.output,
        "needs_calibration": preset.static,
    }


def parts_of_scheme(scheme: Scheme) -> dict[str, Any]:
    """Return the parts of a scheme, in words and numbers."""
    return {
        "name": str(scheme), "kind": "scheme", "element": scheme.element_name,
        "scales": [str(level) for level in scheme.scales], "zero_point": scheme.zero_point.value,
        "rounding": str(scheme.rounding), "overflow": scheme.overflow.value, "dialect": scheme.dialect.name,
        "bits_per_value": scheme.bits_per_value(_A_MATRIX),
    }  # fmt: skip


def in_words(value: object) -> str:
    """Return a part of a scheme as a page says it."""
    if isinstance(value, float):
        return f"{value:.3f} (of a {' x '.join(map(str, _A_MATRIX))} matrix, scales counted)"
    return (", ".join(value) or "none") if isinstance(value, list) else str(value)


def _aliases(name: str) -> str:
    return ", ".join(alias for alias, target in ALIASES.items() if target == name)


def _special(fmt: Format) -> str:
    return " ".join(word for word, has in (("inf", fmt.has_inf), ("nan", fmt.has_nan)) if has)


def number_text(number: Number) -> str:
    """Return a value of a format without rounding."""
    return number.value if isinstance(number, Special) else exact(number)


def _json_number(number: Number) -> float | str:
    """Return a number for JSON: finite ones as numbers, others by name."""
    if number is Special.NEGATIVE_ZERO:
        return -0.0
    return number.value if isinstance(number, Special) else float(number)
