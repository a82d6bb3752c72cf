"""Named formats: one row each, with its source; all else is derived.

This is the only place in the library where a numeric fact of a format is written down.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from ..errors import FormatError, near_misses
from .choices import ChoiceFormat
from .codebooks import CodebookFormat, float32
from .digits import DigitsFormat
from .floats import FloatFormat, Specials
from .integers import IntFormat
from .spec import Format
from .table_codes import TableFormat
from .vectors import VectorFormat, rows_of

_IEEE, _FN, _FNUZ, _FINITE = Specials.IEEE, Specials.FN, Specials.FNUZ, Specials.FINITE


def _float(
    exponent: int, mantissa: int, bias: int, specials: Specials, *, signed: bool = True
) -> FloatFormat:
    return FloatFormat(
        exponent_bits=exponent,
        mantissa_bits=mantissa,
        bias=bias,
        specials=specials,
        signed=signed,
        subnormals=mantissa > 0,
    )


_PAIRS = json.loads(Path(__file__).with_name("normal_grids.json").read_text(encoding="utf-8"))
"""Pairs of least squared error for normal numbers (``tests/oracles/normal_grids.py``), one after the other.

A table of n vectors is a minimum of  E min_j |x - t_j|^2  over x of the standard normal distribution in the
plane: each vector is the mean of its Voronoi cell. The best of several starts was kept; a global optimum is
not proven. Values are rounded to six decimals, which changes no error in its first nine digits: for each
number 29.533588 thousandths of 64 pairs, 7.727725 of 256.

HIGGS, arXiv:2411.17525, quantizes pairs of weights, rotated and divided by their root mean square, to such
tables; the tables of transformers (integrations/higgs.py) have 0.2 and 0.3 % more error.
"""
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip


def _dynamic_map() -> tuple[float, ...]:
    """Return bitsandbytes' signed dynamic map: seven decades, each twice as dense.

    A decade has the middles of ``linspace(0.1, 1, 2 ** i + 1)`` times ``10 ** (i - 6)``, in float32, with the
    sums of linspace rounded once, as torch has them.
    """
    start, values = float32(0.1), [0.0, 1.0]
    for decade in range(7):
        count = 1 << decade
        step, unit = float32(float32(1 - start) / count), float32(10.0 ** (decade - 6))
        upper = [float32(1 - step * (count - i)) for i in range((count + 1) // 2, count + 1)]
        ends = [float32(start + step * i) for i in range((count + 1) // 2)] + upper
        middles = [float32(unit * float32((a + b) / 2)) for a, b in pairwise(ends)]
        values += [*middles, *(-middle for middle in middles)]
    return tuple(sorted(values))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_FP4_BNB_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)

_NORMAL = {
    1: (0.7978845834732056,),
    2: (0.4527800381183624, 1.5104175806045532),
    3: (0.2450941801071167, 0.7560052871704102, 1.3439092636108398, 2.1519455909729004),
    4: (
        0.12839503586292267, 0.38804829120635986, 0.6567591428756714, 0.9423404335975647, 1.2562311887741089,
        1.6180464029312134, 2.069017171859741, 2.7325894832611084,
    ),
}  # fmt: skip
"""By bits, the upper halves of the tables of least squared error for numbers of the normal distribution."""


def _normal(bits: int) -> CodebookFormat:
    upper = _NORMAL[bits]
    return CodebookFormat((*(0.0 - value for value in reversed(upper)), *upper))


_ROWS: tuple[tuple[str, Format, str], ...] = (
    *((f"int{b}", IntFormat(bits=b, signed=True), "two's complement") for b in (*range(2, 17), 32)),
    *((f"uint{b}", IntFormat(bits=b, signed=False), "unsigned binary") for b in (*range(2, 17), 32)),
    ("int8_mx", IntFormat(bits=8, signed=True, fraction_bits=6), "OCP MX 1.0, section 5.3.4"),
    (
        "if4_element",
        ChoiceFormat(_float(2, 1, 1, _FINITE), IntFormat(bits=4, signed=True)),
        "fouroversix (MIT Han Lab), quantize/pytorch/reference.py: the sign of the scale picks e2m1 or int4",
    ),
    ("binary", CodebookFormat((-1.0, 1.0)), "BinaryConnect, arXiv:1511.00363, scaled by the largest"),
    ("ternary", CodebookFormat((-1.0, 0.0, 1.0)), "TWN, arXiv:1605.04711, but scaled by the largest"),
    ("float64", _float(11, 52, 1023, _IEEE), "IEEE 754-2019 binary64"),
    ("float32", _float(8, 23, 127, _IEEE), "IEEE 754-2019 binary32"),
    ("bfloat16", _float(8, 7, 127, _IEEE), "binary32 without its lower 16 bits"),
    ("float16", _float(5, 10, 15, _IEEE), "IEEE 754-2019 binary16"),
    ("float8_e5m2", _float(5, 2, 15, _IEEE), "OCP OFP8 1.0, table 1"),
    ("float8_e4m3fn", _float(4, 3, 7, _FN), "OCP OFP8 1.0, table 1"),
    ("float8_e5m2fnuz", _float(5, 2, 16, _FNUZ), "arXiv:2206.02915"),
    ("float8_e4m3fnuz", _float(4, 3, 8, _FNUZ), "arXiv:2206.02915"),
    ("float8_e8m0fnu", _float(8, 0, 127, _FN, signed=False), "OCP MX 1.0, section 5.4.1"),
    ("float8_ue4m3fn", _float(4, 3, 7, _FN, signed=False), "NVFP4 block scales: e4m3fn without the sign"),
    ("float8_ue5m3fn", _float(5, 3, 15, _FN, signed=False), "CUDA math API, __nv_fp8_ue5m3"),
    ("float6_e3m2fn", _float(3, 2, 3, _FINITE), "OCP MX 1.0, section 5.3.2"),
    ("float6_e2m3fn", _float(2, 3, 1, _FINITE), "OCP MX 1.0, section 5.3.2"),
    ("float4_e2m1fn", _float(2, 1, 1, _FINITE), "OCP MX 1.0, section 5.3.3"),
    ("mx9_element", _float(0, 7, 0, _FINITE), "arXiv:2302.08007, table 2: sign and 7 magnitude bits"),
    ("mx6_element", _float(0, 4, 0, _FINITE), "arXiv:2302.08007, table 2: sign and 4 magnitude bits"),
    ("mx4_element", _float(0, 2, 0, _FINITE), "arXiv:2302.08007, table 2: sign and 2 magnitude bits"),
    ("microexponent", CodebookFormat((1.0, 0.5)), "arXiv:2302.08007: one bit that halves the step of a pair"),
    ("dynamic8", CodebookFormat(_dynamic_map()), "bitsandbytes create_dynamic_map, arXiv:1511.04561"),
    ("nf4", CodebookFormat(_NF4), "QLoRA, arXiv:2305.14314, appendix E"),
    (
        "fp4_bnb",
        CodebookFormat(
            tuple(m / 12.0 for m in _FP4_BNB_MAGNITUDES) + tuple(0.0 - m / 12.0 for m in _FP4_BNB_MAGNITUDES)
        ),
        "bitsandbytes fp4, normalized to 1",
    ),
    *(
        (f"normal{bits}", _normal(bits), "Max, 1960; Lloyd, 1982: least squared error for normal numbers")
        for bits in _NORMAL
    ),
    ("iq4", CodebookFormat(_IQ4), "ggml-common.h, kvalues_iq4nl: without a zero"),
)

CATALOG: MappingProxyType[str, Format] = MappingProxyType({name: fmt for name, fmt, _ in _ROWS})
"""Name to format, in the order of the table in the documentation."""

SOURCES: MappingProxyType[str, str] = MappingProxyType({name: source for name, _, source in _ROWS})
"""Name to the document that defines the format."""

ALIASES: MappingProxyType[str, str] = MappingProxyType({
    "fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu", "e8m0fnu": "float8_e8m0fnu", "ue8m0": "float8_e8m0fnu",
    "ue4m3": "float8_ue4m3fn", "ue4m3fn": "float8_ue4m3fn",
    "ue5m3": "float8_ue5m3fn", "fp8_e5m3": "float8_ue5m3fn",
    "fp6_e3m2": "float6_e3m2fn", "e3m2": "float6_e3m2fn", "float6_e3m2": "float6_e3m2fn",
    "fp6_e2m3": "float6_e2m3fn", "e2m3": "float6_e2m3fn", "float6_e2m3": "float6_e2m3fn",
    "fp4": "float4_e2m1fn", "e2m1": "float4_e2m1fn",
    "fp4_e2m1": "float4_e2m1fn", "float4_e2m1": "float4_e2m1fn",
})  # fmt: skip
"""Short names in common use, to catalog names."""

# HIGGS, arXiv:2411.17525: the grid of least squared error of 16 vectors for pairs of normal numbers, as
# FLUTE and transformers have it.
_HIGGS16 = (
    -0.8996632695198059, -1.6360418796539307, -0.961183488368988, 1.5999565124511719, -1.882026195526123,
    0.678778350353241, 0.36300793290138245, -1.9667866230010986, -0.6814072728157043, -0.576818585395813,
    0.7270012497901917, 0.6186859607696533, 0.3359416127204895, 1.8371193408966064, 1.859930396080017,
    0.036668598651885986, 0.17208248376846313, -0.9401724338531494, -1.7599700689315796,
    -0.6244229674339294, -0.8993809223175049, 0.32267823815345764, 0.839488685131073, -0.3017036020755768,
    1.5314953327178955, 1.2942044734954834, -0.0011779458727687597, 0.00022069070837460458,
    1.4274526834487915, -1.207889199256897, -0.16123905777931213, 0.8787511587142944,
)  # fmt: skip
GRIDS: MappingProxyType[str, VectorFormat] = MappingProxyType(
    {
        "higgs16": VectorFormat(rows_of(_HIGGS16, 2)),
        **{name: VectorFormat(rows_of(tuple(numbers), 2)) for name, numbers in _PAIRS.items()},
    }
)
"""Tables of vectors by the names that their text form takes in the place of values: ``vector2[higgs16]``."""

_NAMES = {fmt: name for name, fmt, _ in reversed(_ROWS)}
_NAMES |= {fmt: f"vector{fmt.per_code}[{name}]" for name, fmt in GRIDS.items()}
_INT = re.compile(r"(u?)int(\d{1,2})(?:f(\d{1,2}))?", re.ASCII)
_FLOAT = re.compile(r"(u?)e(\d{1,2})m(\d{1,2})(?:b(-?\d{1,4}))?(ieee|fnuz|fn|finite)?(ns)?", re.ASCII)
_TABLE = re.compile(r"(codebook|vector(\d{1,2})|digits(\d{1,2}))\[([^\]]*)\]", re.ASCII)
_OF_BLOCKS = re.compile(r"table(\d{1,2})", re.ASCII)
_CHOICE = re.compile(r"choice\[([^,\]]*),([^,\]]*)\]")


def get_format(name: str | Format, *, others: Iterable[str] = ()) -> Format:
    """Return a format by catalog name, alias, or custom spelling.

    Spellings are ``int<bits>[f<fraction bits>]``, ``uint...``, ``codebook[v0,v1,...]``,
    ``choice[e2m1,int4]``, ``vector2[x0,y0,x1,y1,...]`` or ``vector2[higgs16]``, ``digits5[-1,0,1]``,
    ``table<bits>``, and ``[u]e<E>m<M>[b<bias>][ieee|fn|fnuz|finite][ns]``: the bias defaults to
    ``2 ** (E - 1) - 1`` (0 for ``E = 0``), the specials to ``finite``; ``ns`` means no subnormals. An alias
    wins: ``e4m3`` and ``e5m2`` are the OCP formats.

    Args:
        name: a name or text form, such as ``"float8_e4m3fn"`` or ``"int4"``; a format is returned as it is.
        others: what else the caller takes in its place, which messages suggest too.

    Raises:
        FormatError: with the closest names, when there is no such format.

    Example:
        >>> get_format("e4m3") is get_format("float8_e4m3fn")
        True
        >>> get_format("e3m4").max
        Fraction(31, 1)
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise FormatError(f"format (={name!r}) must be a name such as float8_e4m3fn, or a Format")
    key = name.strip().lower()
    named = CATALOG.get(ALIASES.get(key, key))
    if named is not None:
        return named
    if match := _INT.fullmatch(key):
        sign, bits, fraction = match.groups()
        return IntFormat(bits=int(bits), signed=not sign, fraction_bits=int(fraction or 0))
    if match := _FLOAT.fullmatch(key):
        sign, exponent, mantissa, bias, specials, flat = match.groups()
        width = int(exponent)
        return FloatFormat(
            exponent_bits=width,
            mantissa_bits=int(mantissa),
            signed=not sign,
            subnormals=not flat,
            bias=int(bias) if bias is not None else max(0, (1 << width >> 1) - 1),
            specials=Specials(specials or "finite"),
        )
    if match := _TABLE.fullmatch(key):
        return _table(*match.groups())
    if match := _OF_BLOCKS.fullmatch(key):
        return TableFormat(int(match.group(1)))
    if match := _CHOICE.fullmatch(key):
        return _choice(*map(get_format, match.groups()))
    raise FormatError(f"format {name!r} is unknown; {near_misses(name, [*others, *CATALOG, *ALIASES])}")


def _table(kind: str, length: str | None, digits: str | None, text: str) -> Format:
    grid = GRIDS.get(text.strip())
    if grid is not None and kind == f"vector{grid.per_code}":
        return grid
    values = _numbers(text, [name for name, grid in GRIDS.items() if kind == f"vector{grid.per_code}"])
    if length is not None:
        return VectorFormat(rows_of(values, int(length)))
    return CodebookFormat(values) if digits is None else DigitsFormat(CodebookFormat(values), int(digits))


def _choice(first: Format, second: Format) -> ChoiceFormat:
    if not isinstance(first, FloatFormat) or not isinstance(second, IntFormat):
        raise FormatError(
            f"choice[{first.spelling},{second.spelling}] must name a float format, then an integer format"
        )
    return ChoiceFormat(first, second)


def _numbers(text: str, grids: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(float(v) for v in text.split(","))
    except ValueError as error:
        known = f", or one of {', '.join(grids)}" if grids else ""
        raise FormatError(
            f"values {text!r} of a codebook must be numbers separated by commas{known}"
        ) from error


def format_name(fmt: Format) -> str:
    """Return the catalog name or canonical spelling; ``get_format`` reads both.

    Args:
        fmt: a format of any kind.

    Example:
        >>> format_name(FloatFormat(exponent_bits=3, mantissa_bits=4, bias=3, specials=Specials.FINITE))
        'e3m4b3finite'
    """
    known = get_format(fmt)
    return _NAMES.get(known, known.spelling)
