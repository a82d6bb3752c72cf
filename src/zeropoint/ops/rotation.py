r"""Random block Hadamard rotations that spread outliers over their block.

    rotate(x)    =  H D x / sqrt(b)         for each block of b columns, b a power of two
    unrotate(y)  =  D H y / sqrt(b)

H is Sylvester's Hadamard matrix (:func:`scipy.linalg.hadamard`), symmetric with ``H H = b I``, and D holds a
random sign for each column. A rotation is orthogonal: it keeps squared errors and inner products, so that
``rotate(W) rotate(x) = W x`` up to rounding.

**Exact.** Numbers are computed in float32, float64 as such, and rounded once to the dtype of the input. In
stage k = 0, 1, ... of log2(b) the numbers at places i and i + 2 ** k, where bit k of i is 0, become their sum
and difference; then all are multiplied by the float of 1 / sqrt(b), and by their sign, first where rotating,
last where undoing it. That is additions and products of numbers alone, each rounded by IEEE 754: no device,
thread count or shape changes a byte. A block costs b log2(b) additions.

Signs are the bits of SplitMix64 from the seed, the lowest first: 1 is negative.

Source: Ailon and Chazelle, The fast Johnson-Lindenstrauss transform, 2009 (H D); Chee et al., QuIP#,
arXiv:2402.04396 (weights); Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch

from ..errors import SchemeError, ShapeError
from ..formats.torch_dtypes import wide_dtype

_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64."""
_TILE = 1 << 16
"""Numbers that are rotated at once, whose temporaries stay in cache."""
_LARGEST = 1 << 16
_TEXT = re.compile(r"hadamard(\d+)(?:@(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """A block Hadamard rotation of the last axis.

    size: columns of a block, a power of two. seed: of the signs, below 2 ** 64. Raises SchemeError for
    another size or seed.

    >>> rotation = Rotation(size=4)
    >>> x = torch.tensor([[8.0, 0.0, 0.0, 0.0]])
    >>> rotation.rotate(x).abs()
    tensor([[4., 4., 4., 4.]])
    >>> torch.equal(rotation.unrotate(rotation.rotate(x)), x)
    True
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.size <= _LARGEST or self.size & (self.size - 1):
            raise SchemeError(f"size (={self.size}) of a rotation must be a power of two up to {_LARGEST}")
        if not 0 <= self.seed <= _WORD:
            raise SchemeError(f"seed (={self.seed}) of a rotation must be at least 0 and below 2 ** 64")

    @staticmethod
    def parse(text: str) -> Rotation:
        """Return the rotation that ``text`` spells, as ``str`` does.

        text: such as ``"hadamard128"`` or ``"hadamard64@7"``. Raises SchemeError for another text.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise SchemeError(f"rotation {text!r} must be hadamard<SIZE> or hadamard<SIZE>@<SEED>")
        return Rotation(size=int(found[1]), seed=int(found[2] or 0))

    def __str__(self) -> str:
        return f"hadamard{self.size}" + (f"@{self.seed}" if self.seed else "")

    def rotate(self, x: torch.Tensor, signs: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x`` with its last axis rotated, in its dtype and shape.

        x: floats, of any shape whose last axis is whole blocks. signs: the result of :meth:`signs` on the
        device of ``x``, where it is at hand. Raises ShapeError for parts of blocks.
        """
        signs = self._signs_for(x, signs)
        wide = x.to(wide_dtype(x.dtype))
        return self._tiled(wide * signs.to(wide.dtype), None).to(x.dtype)

    def unrotate(self, x: torch.Tensor, signs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the inverse of :meth:`rotate`, up to rounding.

        x: floats, of any shape whose last axis is whole blocks. signs: as for :meth:`rotate`. Raises
        ShapeError for parts of blocks.
        """
        signs = self._signs_for(x, signs)
        wide = x.to(wide_dtype(x.dtype))
        return self._tiled(wide, signs.to(wide.dtype)).to(x.dtype)

    def signs(self, columns: int) -> torch.Tensor:
        """Return the signs of so many columns, 1 and -1: (columns,) int8.

        Example:
            >>> Rotation(size=2, seed=1).signs(8)
            tensor([-1,  1,  1,  1,  1,  1, -1, -1], dtype=torch.int8)
        """
        return _signs(self.seed, columns).clone()

    def _signs_for(self, x: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
        if x.ndim == 0 or x.shape[-1] % self.size:
            raise ShapeError(
                f"size (={self.size}) of the rotation must divide the last axis of a tensor of shape "
                f"{tuple(x.shape)}; take a smaller power of two"
            )
        return _signs(self.seed, x.shape[-1]).to(x.device) if signs is None else signs

    def _tiled(self, x: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
        """Return ``x`` transformed, times ``signs``, in tiles outside of autograd."""
        rows = x.reshape(-1, x.shape[-1])
        step = max(1, _TILE // max(1, rows.shape[1]))
        watched = torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled())
        if watched or rows.shape[0] <= step:
            return self._transformed(rows, signs).reshape(x.shape)
        out = torch.empty_like(rows)
        for start in range(0, rows.shape[0], step):
            out[start : start + step] = self._transformed(rows[start : start + step], signs)
        return out.reshape(x.shape)

    def _transformed(self, rows: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
        """Return H / sqrt(b) times each block of ``rows``."""
        # Places first and blocks last: each stage then adds long runs.
        y = rows.reshape(-1, self.size).t().contiguous()
        count = y.shape[1]
        for stage in range(self.size.bit_length() - 1):
            y = y.reshape(-1, 2, (1 << stage) * count)
            low, high = y[:, 0], y[:, 1]
            y = torch.stack((low + high, low - high), 1)
        y = y.reshape(self.size, count) * (1.0 / self.size**0.5)
        found: torch.Tensor = y.t().reshape(rows.shape)
        return found if signs is None else found * signs


@functools.lru_cache(maxsize=64)
def _signs(seed: int, columns: int) -> torch.Tensor:
    words, state = list[int](), seed
    for _ in range(-(-columns // 64)):
        state = (state + _GOLDEN) & _WORD
        words.append(_mixed(state))
    bits = [words[column >> 6] >> (column & 63) & 1 for column in range(columns)]
    found: torch.Tensor = 1 - 2 * torch.tensor(bits, dtype=torch.int8, device="cpu")
    return found


def _mixed(state: int) -> int:
    """Return the next number of SplitMix64.

    >>> _mixed(1234567 + _GOLDEN)
    6457827717110365317
    """
    state = (state ^ state >> 30) * _FIRST & _WORD
    state = (state ^ state >> 27) * _SECOND & _WORD
    return state ^ state >> 31
