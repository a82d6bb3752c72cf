"""Granularity: blocks of elements that share parameters."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from ..errors import SchemeError, ShapeError

WHOLE = 0
"""Extent that means the whole axis."""
MAX_RANK = 64
"""Most axes a torch tensor can have."""


class Anchor(enum.Enum):
    """Which end of the shape the extents are aligned to."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Granularity:
    """Block shape: extents along the first or last axes.

    ``rest`` is the extent along every other axis. The last block along an axis may be short: it is a block
    like any other, with parameters of its own.

    Args:
        extents: lengths of a block along the anchored axes; 0 for a whole axis.
        rest: length along every other axis: 0 or 1.
        anchor: whether ``extents`` are of the first or the last axes.

    Raises:
        SchemeError: for a negative extent, or a ``rest`` other than 0 and 1.

    Example:
        >>> Granularity.group(32).grid((4, 70))
        (4, 3)
    """

    extents: tuple[int, ...] = ()
    rest: int = WHOLE
    anchor: Anchor = Anchor.LAST

    def __post_init__(self) -> None:
        if any(extent < 0 for extent in self.extents):
            raise SchemeError(f"extents (={self.extents}) of a block must be positive, or 0 for a whole axis")
        if self.rest not in (WHOLE, 1):
            raise SchemeError(f"rest (={self.rest}) must be 0 (whole axes) or 1")

    @classmethod
    def tensor(cls) -> Granularity:
        """Return one block: the tensor."""
        return cls()

    @classmethod
    def channel(cls, axis: int = 0) -> Granularity:
        """Return one block for each index of ``axis``, which may be negative.

        Args:
            axis: of the channels.

        Raises:
            SchemeError: for an axis that no tensor has.
        """
        if not -MAX_RANK <= axis < MAX_RANK:
            raise SchemeError(f"channel axis (={axis}) must lie in {-MAX_RANK}..{MAX_RANK - 1}")
        if axis < 0:
            return cls(extents=(1, *[WHOLE] * (-axis - 1)), anchor=Anchor.LAST)
        return cls(extents=(*[WHOLE] * axis, 1), anchor=Anchor.FIRST)

    @classmethod
    def token(cls) -> Granularity:
        """Return one block for each row along the last axis."""
        return cls(extents=(WHOLE,), rest=1)

    @classmethod
    def group(cls, size: int) -> Granularity:
        """Return blocks of ``size`` consecutive elements of the last axis.

        Args:
            size: values in a group.

        Raises:
            SchemeError: for a size below 1.
        """
        if size < 1:
            raise SchemeError(f"group size (={size}) must be at least 1; use token for one group a row")
        return cls(extents=(size,), rest=1)

    @classmethod
    def along(cls, axis: int, size: int) -> Granularity:
        """Return blocks of ``size`` elements along an axis, or the whole axis.

        Args:
            axis: along which the blocks run.
            size: values in a block.

        Example:
            >>> Granularity.along(0, 32).grid((70, 4))
            (3, 4)
        """
        others = len(cls.channel(axis).extents) - 1
        if axis < 0:
            return cls(extents=(size, *[1] * others), rest=1)
        return cls(extents=(*[1] * others, size), rest=1, anchor=Anchor.FIRST)

    @classmethod
    def block(cls, *shape: int) -> Granularity:
        """Return blocks of ``shape`` over the last axes.

        Args:
            shape: lengths of a block along the last axes.

        Raises:
            SchemeError: for a length below 1.
        """
        if not shape or min(shape) < 1:
            raise SchemeError(f"block shape (={shape}) must name at least one positive extent")
        return cls(extents=shape, rest=1)

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extent of a full block along each axis.

        Args:
            shape: extents of the axes; of the blocks, whole axes take theirs from it.

        Raises:
            ShapeError: when the tensor has fewer axes than the granularity names.
        """
        rank = len(shape)
        if len(self.extents) > rank:
            raise ShapeError(f"granularity {self} needs at least {len(self.extents)} axes, got shape {shape}")
        rest = [self.rest] * (rank - len(self.extents))
        extents = [*self.extents, *rest] if self.anchor is Anchor.FIRST else [*rest, *self.extents]
        return tuple(
            max(1, length) if extent == WHOLE else extent
            for extent, length in zip(extents, shape, strict=True)
        )

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of blocks along each axis.

        Args:
            shape: extents of the axes; a partial last block counts as one.
        """
        return tuple(
            -(-length // extent) for length, extent in zip(shape, self.block_shape(shape), strict=True)
        )

    def block_count(self, shape: tuple[int, ...]) -> int:
        """Return the number of blocks in a tensor of ``shape``.

        Args:
            shape: extents of the axes; a partial last block counts as one.
        """
        return math.prod(self.grid(shape))

    def __str__(self) -> str:
        for text, value in _NAMED.items():
            if self == value:
                return text
        if self.anchor is Anchor.LAST and self.rest == 1 and self.extents and min(self.extents) > 0:
            sizes = "x".join(map(str, self.extents))
            return f"g{sizes}" if len(self.extents) == 1 else f"block{sizes}"
        axis = self.channel_axis
        if axis is not None:
            return f"channel{axis}"
        return f"{self.anchor.value}[{','.join(map(str, self.extents))}]rest{self.rest}"

    @property
    def channel_axis(self) -> int | None:
        """The axis of :meth:`channel` blocks, one per index, or None."""
        first = self.anchor is Anchor.FIRST
        position = len(self.extents) - 1 if first else 0
        axis = position if first else -len(self.extents)
        return axis if self.extents and self == Granularity.channel(axis) else None

    @classmethod
    def parse(cls, text: str) -> Granularity | None:
        """Return the granularity that ``text`` spells, or None when it spells none.

        Args:
            text: the text form.
        """
        if text in _NAMED:
            return _NAMED[text]
        # [0-9]: \d takes other scripts' digits. Eighteen of them hold every extent below the limit of int64.
        if match := re.fullmatch(r"g([0-9]{1,18})", text):
            return cls.group(int(match.group(1)))
        if match := re.fullmatch(r"block([0-9]{1,18}(?:x[0-9]{1,18})*)", text):
            return cls.block(*map(int, match.group(1).split("x")))
        if match := re.fullmatch(r"channel(-?[0-9]{1,2})", text):
            return cls.channel(int(match.group(1)))
        if match := re.fullmatch(r"(first|last)\[((?:[0-9]{1,18},?)*)\]rest([01])", text):
            anchor, extents, rest = match.groups()
            return cls(
                extents=tuple(int(e) for e in extents.split(",") if e), rest=int(rest), anchor=Anchor(anchor)
            )
        return None


_NAMED = {"tensor": Granularity.tensor(), "channel": Granularity.channel(0), "token": Granularity.token()}
