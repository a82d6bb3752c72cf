"""The scheme value: element format, scales, zero point, range, rounding, dialect."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache, total_ordering
from typing import ClassVar, TypeVar

from ..errors import SchemeError
from ..formats import Format, IntFormat, Overflow, RoundingMode, format_name, get_format
from ..shown import repr_html
from .dialects import ZEROPOINT, Dialect, ZeroPointPlace, get_dialect
from .granularity import Granularity
from .levels import beyond_factors, chained, check_levels, granularity_of, joined_levels, read_levels
from .scale_rules import Search
from .scales import ScaleLevel
from .text import join, words

E = TypeVar("E", bound=enum.Enum)


class ZeroPoint(enum.Enum):
    """What is subtracted from a code before scaling."""

    NONE = "none"
    """Nothing: symmetric."""
    INTEGER = "integer"
    """An integer in the code range, so that 0.0 has a code of its own."""
    REAL = "real"
    """A float32: the range is met exactly, 0.0 is not."""


class RangeRule(enum.Enum):
    """Which codes of a signed integer format are used."""

    FULL = "full"
    """All of them; the symmetric divisor is half the number of steps, ``(2 ** bits - 1) / 2``."""
    NARROW = "narrow"
    """Without the most negative one; the symmetric divisor is ``2 ** (bits - 1) - 1``."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A rounding mode, with the seed that makes stochastic rounding repeatable.

    Stochastic rounding draws its bits from the seed and the element's flat index, so tiles and threads do not
    matter.

    Args:
        mode: where a number between two codes goes.
        seed: of the bits of stochastic rounding; other modes have none.
    """

    mode: RoundingMode = RoundingMode.HALF_EVEN
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed and self.mode is not RoundingMode.STOCHASTIC:
            raise SchemeError(f"seed (={self.seed}) belongs to stochastic rounding, not to {self.mode.value}")
        if not 0 <= self.seed < 1 << 31:
            raise SchemeError(f"seed (={self.seed}) must lie in 0..2**31-1")

    @classmethod
    def parse(cls, text: str) -> Rounding:
        """Return the rounding that ``text`` spells: a mode, or ``stochastic(SEED)``.

        Args:
            text: the text form.

        Raises:
            SchemeError: for an unknown rounding.
        """
        if match := re.fullmatch(r"stochastic\(([0-9]{1,18})\)", text):
            return cls(mode=RoundingMode.STOCHASTIC, seed=int(match.group(1)))
        if text == RoundingMode.STOCHASTIC.value:
            raise SchemeError("stochastic rounding needs a seed, as in round=stochastic(7)")
        return cls(mode=_choice(RoundingMode, "round", text))

    def __str__(self) -> str:
        return f"stochastic({self.seed})" if self.mode is RoundingMode.STOCHASTIC else self.mode.value


@total_ordering
@dataclass(frozen=True, kw_only=True, repr=False)
class Scheme:
    """How a tensor becomes codes and parameters.

    ``value[i] = (decode(code[i]) - zero_point[b(i)]) * scale[b(i)] + offset[b(i)]``, or, of elements such as
    ``table4``, whose scale is a table of each block, ``value[i] = scale[b(i)][code[i]]``

    From these follow:

    levels: all, in the order of their tensors: scales, offsets, the center.
    level_names: under which these tensors are saved, such as ``scale1``.
    beyond_factors: what decoding takes beyond codes, less their zero points, times scales in formats of
        floats, or None.
    chained: what the scheme has beyond positive scales in formats of floats, which kernels need not know, or
        None.

    Args:
        element: the format of the codes.
        scales: the levels whose product is the scale, finest first; empty means that codes are the values.
        zero_point: none, integer or real; blocks are the finest level's.
        range_rule: full or narrow codes of a signed integer format.
        rounding, overflow: what happens between codes and past the largest.
        dialect: whose small choices are followed.
        offsets: the levels whose product is the offset, finest first, on blocks as for scales; empty
            means 0.
        center: a number that is added to the product of the scales, such as their mean; None means 0.

    Raises:
        SchemeError: for combinations without meaning, such as a zero point on a float format.

    Example:
        >>> Scheme.parse("int4:g128").divisor
        7.5
    """

    element: Format
    scales: tuple[ScaleLevel, ...] = ()
    zero_point: ZeroPoint = ZeroPoint.NONE
    range_rule: RangeRule = RangeRule.FULL
    rounding: Rounding = Rounding()
    overflow: Overflow = Overflow.SATURATE
    dialect: Dialect = ZEROPOINT
    offsets: tuple[ScaleLevel, ...] = ()
    center: ScaleLevel | None = None
    # Set for each value, but no fields (hence ClassVar): torch.compile (2.13) traces neither the lock of a
    # cached_property nor properties of constants, and makes constants anew from all fields.
    levels: ClassVar[tuple[ScaleLevel, ...]]
    level_names: ClassVar[tuple[str, ...]]
    beyond_factors: ClassVar[str | None]
    chained: ClassVar[str | None]

    def __post_init__(self) -> None:
        center = () if self.center is None else (self.center,)
        scales = tuple(f"scale{number}" for number in range(1, len(self.scales) + 1))
        offsets = tuple(f"offset{number}" for number in range(1, len(self.offsets) + 1))
        object.__setattr__(self, "levels", (*self.scales, *self.offsets, *center))
        object.__setattr__(self, "level_names", (*scales, *offsets, *(("center",) if center else ())))
        object.__setattr__(self, "beyond_factors", beyond_factors(self))
        object.__setattr__(self, "chained", chained(self))
        self._check_element()
        check_levels(self)

    def _check_element(self) -> None:
        integer = self.element.is_integer
        if self.zero_point is not ZeroPoint.NONE and (not integer or not self.scales):
            raise SchemeError(
                f"zero_point (={self.zero_point.value}) needs a scaled integer format, "
                f"got {self.element_name}"
            )
        if self.range_rule is RangeRule.NARROW and not (integer and self.element.signed):
            raise SchemeError(f"range (=narrow) needs a signed integer format, got {self.element_name}")
        if self.element.is_table and self.rounding.mode is not RoundingMode.HALF_EVEN:
            raise SchemeError(
                f"rounding (={self.rounding}) has no meaning for a codebook, which takes the nearest value"
            )

        self._check_overflow()

    def _check_overflow(self) -> None:
        if self.overflow is Overflow.SATURATE:
            return
        if self.element.is_table:
            raise SchemeError(
                f"overflow (={self.overflow.value}) has no meaning for a codebook, which takes the nearest "
                "value"
            )
        if self.overflow is Overflow.SPECIAL and not (self.element.has_inf or self.element.has_nan):
            raise SchemeError(
                f"overflow (=special) needs a format with Inf or NaN, got {self.element_name}; use saturate"
            )

    @property
    def element_name(self) -> str:
        """Name of the element format."""
        return format_name(self.element)

    @property
    def structure(self) -> tuple[object, ...]:
        """Codes and levels, independent of the rule, rounding or dialect."""
        scales, offsets = (
            tuple((level.granularity, level.format) for level in levels)
            for levels in (self.scales, self.offsets)
        )
        return self.element, scales, offsets, self.zero_point, self.center

    @property
    def granularity(self) -> Granularity:
        """Blocks of the finest parameters."""
        return self.scales[0].granularity if self.scales else Granularity.tensor()

    @property
    def search(self) -> Search | None:
        """The rule of the finest scales where it compares errors, or None."""
        rule = self.scales[0].rule if self.scales else None
        return rule if isinstance(rule, Search) else None

    @cached_property
    def start(self) -> Scheme:
        """The scheme that gives a search its starting scales, else itself."""
        if self.search is None:
            return self
        finest, *coarser = self.scales
        return replace(self, scales=(replace(finest, rule=self.search.start), *coarser))

    @cached_property
    def unseeded(self) -> Scheme:
        """The scheme with seed 0, shared by all training steps."""
        return replace(self, rounding=replace(self.rounding, seed=0)) if self.rounding.seed else self

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest value of the codes, in units of the scale."""
        low, high = self.element.ends(narrow=self.range_rule is RangeRule.NARROW)
        return float(low), float(high)

    @property
    def qmin(self) -> int:
        """Smallest integer code in use; RangeRule decides about the most negative one."""
        element = self._integer()
        return -element.qmax if self.range_rule is RangeRule.NARROW else element.qmin

    @property
    def qmax(self) -> int:
        """Largest integer code in use."""
        return self._integer().qmax

    @property
    def element_step(self) -> Fraction:
        """Distance between the values of neighboring integer codes; 1 of other elements."""
        return self.element.step

    def _integer(self) -> IntFormat:
        if not isinstance(self.element, IntFormat):
            raise SchemeError(f"{self.element_name} has no integer code range")
        return self.element

    @cached_property
    def divisor(self) -> float:
        """Divisor of a block's amax that gives its symmetric scale.

        Exact in float64, and in float32 for elements of at most 24 bits.
        """
        return float(self.element.divisor(narrow=self.range_rule is RangeRule.NARROW))

    @property
    def even_bits(self) -> int:
        """Mantissa width to which the even rule rounds amax."""
        width = self.dialect.even_mantissa_bits
        if width is None or self.bits == self.dialect.even_own_bits:
            return self.element.mantissa_bits
        return width

    @property
    def widens_to_zero(self) -> bool:
        """Whether affine ranges include 0, as integer zero points need."""
        return self.zero_point is not ZeroPoint.REAL

    @property
    def zero_inside(self) -> bool:
        """Whether zero points are added before numbers are rounded."""
        inside = self.dialect.zero_points.place is ZeroPointPlace.INSIDE_ROUNDING
        return self.zero_point is ZeroPoint.REAL or (self.zero_point is ZeroPoint.INTEGER and inside)

    @property
    def formula_zero_point(self) -> bool:
        """Whether an empty range takes the formula's zero point, not 0."""
        return self.dialect.zero_points.of_empty_range or self.zero_point is ZeroPoint.REAL

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.element.bits

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of a tensor.

        It is the tensor's own, unless a code represents several neighbors. Codes do not reach into the next
        block, so that the last one of a block may represent fewer.

        Args:
            shape: of the tensor to be quantized.
        """
        per = self.element.per_code
        if per == 1:
            return shape
        *lead, count = shape or (1,)
        blocks, rest = divmod(count, self.row_block(shape))
        return (*lead, blocks * -(-self.row_block(shape) // per) - (-rest // per))

    def row_block(self, shape: tuple[int, ...]) -> int:
        """Return the length of a finest block along the last axis.

        Args:
            shape: of the tensor to be quantized.
        """
        return self.granularity.block_shape(shape)[-1] if shape else 1

    def bits_per_value(self, shape: tuple[int, ...]) -> float:
        """Return the average bits of an element, with scales and zero points.

        Levels in formats of floats take whole bytes, others are packed like codes; levels in the input's own
        format count 16 bits. An empty tensor has 0.

        Args:
            shape: of the tensor to be quantized; its last blocks may be partial.
        """
        total = self.bits * _product(self.code_shape(shape))
        counts = (level.granularity.block_count(shape) for level in self.levels)
        total += (
            sum(level.bits * n for level, n in zip(self.levels, counts, strict=True)) * self.element.per_scale
        )
        if self.zero_point is not ZeroPoint.NONE:
            width = self.bits if self.zero_point is ZeroPoint.INTEGER else 32
            total += width * self.granularity.block_count(shape)
        return total / max(1, _product(shape))

    @staticmethod
    def parse(text: str | Scheme) -> Scheme:
        """Return the scheme of a text or preset: ``ELEMENT[:GRANULARITY][:OPTION...]``.

        :mod:`zeropoint.schemes.text` has the grammar.

        Args:
            text: a text form or preset such as ``"int4:g128"``; a scheme is returned as it is.

        Raises:
            SchemeError: that names the wrong part.
            FormatError: that names the wrong part.

        Example:
            >>> str(Scheme.parse("mxfp4_e2m1:scale=even"))
            'float4_e2m1fn:g32:scale=even'
        """
        if isinstance(text, Scheme):
            return text
        if not isinstance(text, str):
            raise SchemeError(f"scheme (={text!r}) must be a text such as int4:g128, or a Scheme")
        return _parse(text)

    def __lt__(self, other: object) -> bool:
        """Order schemes by text form: a total order consistent with equality.

        >>> [str(scheme) for scheme in sorted(map(Scheme.parse, ("int8:channel", "int4")))]
        ['int4:tensor', 'int8:channel']
        """
        return str(self) < str(other) if isinstance(other, Scheme) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, part.name) for part in fields(self)))

    def __reduce__(self) -> tuple[Callable[[str], Scheme], tuple[str]]:
        # Copies and pickles are what parsing gives, one object for one text: torch.compile (2.13) traces
        # quantizers only where the scheme in the module is the one that operators parse. A function of the
        # module, unlike a method, is what torch.load can allow.
        return _parse, (str(self),)

    _repr_html_ = repr_html

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Scheme({self._text!r})"

    @cached_property
    def _text(self) -> str:
        parts = {"element": self.element_name}
        if self.scales:
            parts["granularity"] = str(self.granularity)
            parts |= joined_levels(self)
        else:
            parts["cast"] = "yes"
        if self.zero_point is not ZeroPoint.NONE:
            parts["asym"] = self.zero_point.value
        if self.range_rule is RangeRule.NARROW:
            parts["narrow"] = "yes"
        if self.rounding != Rounding(mode=self.dialect.rounding):
            parts["round"] = str(self.rounding)
        if self.overflow is not Overflow.SATURATE:
            parts["overflow"] = self.overflow.value
        if self.dialect != ZEROPOINT:
            parts["dialect"] = self.dialect.name
        return join(parts)

    def with_dialect(self, dialect: Dialect) -> Scheme:
        """Return the scheme in another dialect, with its rounding unless set explicitly.

        Args:
            dialect: one of :data:`~zeropoint.schemes.DIALECTS` or a value of one's own.
        """
        special = self.rounding.mode is not self.dialect.rounding
        return replace(
            self, dialect=dialect, rounding=self.rounding if special else Rounding(mode=dialect.rounding)
        )


@lru_cache(maxsize=4096)
def _parse(text: str) -> Scheme:
    parts = words(text)
    granularity = granularity_of(parts.get("granularity", "tensor"))
    dialect = get_dialect(parts.get("dialect", ZEROPOINT.name))
    rounding = Rounding.parse(parts["round"]) if "round" in parts else Rounding(mode=dialect.rounding)
    levels = read_levels(parts, granularity, cast=_switch("cast", parts))
    scheme = Scheme(
        element=get_format(parts["element"]),
        scales=levels["scale"],
        offsets=levels["offset"],
        center=next(iter(levels["center"]), None),
        zero_point=_choice(ZeroPoint, "asym", parts.get("asym", "none")),
        range_rule=RangeRule.NARROW if _switch("narrow", parts) else RangeRule.FULL,
        rounding=rounding,
        overflow=_choice(Overflow, "overflow", parts.get("overflow", "saturate")),
        dialect=dialect,
    )
    # One object for all spellings: a look-up finds it without comparing its fields.
    return scheme if str(scheme) == text else _parse(str(scheme))


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result


def _switch(option: str, parts: Mapping[str, str]) -> bool:
    text = parts.get(option, "no")
    if text not in ("yes", "no"):
        raise SchemeError(f"{option} (={text!r}) must be yes or no")
    return text == "yes"


def _choice(kind: type[E], option: str, text: str) -> E:
    for member in kind:
        if member.value == text:
            return member
    known = ", ".join(str(member.value) for member in kind)
    raise SchemeError(f"{option} (={text!r}) is unknown; known are {known}")
