"""IQ4_NL, IQ4_XS, MXFP4 and NVFP4: codes into a table of values."""

from __future__ import annotations

import itertools

import torch

from ...formats import get_format
from ...formats.division import divided, over
from .block_columns import SUPER, Importance, Stored, columns, halves, patterns, weighted
from .float_steps import LEAST, inverse, largest, nearest, ratio, total, truncated

_IQ4 = get_format("iq4")
LEVELS = tuple(float(_IQ4.numbers(code)[0]) for code in range(_IQ4.code_count))  # type: ignore[arg-type]
"""The values of codes of IQ4."""
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values of codes of MXFP4 and NVFP4, times two: scales are halved in return."""
BLOCK, SHORT = 32, 16
_TRIES = 7


def _closest(x: torch.Tensor) -> torch.Tensor:
    """Return the closest IQ4 codes, int32; ties go up, NaN is 15."""
    codes = torch.zeros_like(x, dtype=torch.int32)
    for low, high in itertools.pairwise(LEVELS):
        codes += ~(x < (low + high) / 2)
    return codes


def _table_scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return each column's scale of least weighted error among candidates."""
    table = torch.tensor(LEVELS, dtype=torch.float32, device=x.device)
    amax, value = largest(x)

    def tried(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = table[_closest(factor * x)]
        return total(w * values * x), total(w * values * values)

    products, squares = tried(over(1.0, divided(-value, LEVELS[0])))
    scale = ratio(products, squares)
    best = scale * products
    for step in range(-_TRIES, _TRIES + 1):
        products, squares = tried(over(step + LEVELS[0], value))
        better = (squares > 0) & (products * products > best * squares)
        scale = torch.where(better, products / squares, scale)
        best = torch.where(better, scale * products, best)
    return torch.where(amax < LEAST, 0.0, scale)


def _table_weights(x: torch.Tensor, importance: Importance, run: int) -> torch.Tensor:
    blocks = columns(x, BLOCK)
    if importance is None:
        return blocks * blocks
    return weighted(x, importance, BLOCK, run, 2.0)


def nonlinear(x: torch.Tensor, importance: Importance) -> Stored:
    """IQ4_NL: a float16 scale for 32 values."""
    blocks = columns(x, BLOCK)
    scale = _table_scale(blocks, _table_weights(x, importance, BLOCK))
    return patterns(_closest(inverse(scale) * blocks), len(x), 15), [halves(scale, len(x))]


def nonlinear_super(x: torch.Tensor, importance: Importance) -> Stored:
    """IQ4_XS: 6-bit scales under a float16 per 256; codes use unrounded ones."""
    blocks, count = columns(x, BLOCK), SUPER // BLOCK
    scales = columns(_table_scale(blocks, _table_weights(x, importance, SUPER)), count)
    whole = divided(-largest(scales)[1], 32)
    fine = nearest(inverse(whole) * scales).clamp(-32, 31)
    codes = _closest(inverse((whole * fine).T.flatten()) * blocks)
    return patterns(codes, len(x), 15), [patterns(fine, len(x), 63), halves(whole, len(x))]


def microscaling(x: torch.Tensor, _importance: Importance) -> Stored:
    """MXFP4: power-of-two scale from the rounded-down float32 logarithm."""
    blocks = columns(x, BLOCK)
    amax = blocks.abs().amax(0)
    exponent = truncated(amax.double().log2().float().floor() + 125) & 0xFF
    exponent = torch.where(amax > 0, exponent, 0)
    scale = torch.ldexp(torch.ones_like(amax), exponent - 128)
    return patterns(_closest_float(blocks, scale), len(x), 15), [patterns(exponent[None], len(x), 0xFF)]


def nvfp4(x: torch.Tensor, _importance: Importance) -> Stored:
    """NVFP4: an unsigned e4m3 for 16 values."""
    blocks = columns(x, SHORT)
    code = _unsigned_e4m3(divided(blocks.abs().amax(0), 6))
    exponent, mantissa = code >> 3, (code & 7).float()
    value = torch.where(exponent > 0, mantissa + 8, mantissa)
    scale = torch.ldexp(value, exponent.clamp(min=1) - 11)
    return patterns(_closest_float(blocks, scale), len(x), 15), [patterns(code[None], len(x), 0xFF)]


def _closest_float(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the first codes of least error under ``scale``, int32."""
    best = x.abs()
    codes = torch.zeros_like(x, dtype=torch.int32)
    for code, value in enumerate(DOUBLED):
        error = (value * scale - x).abs()
        codes = torch.where(error < best, code, codes)
        best = torch.where(error < best, error, best)
    return codes


def _unsigned_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return unsigned e4m3 codes of ``x``, int32, as ggml rounds them.

    Ties go up, the largest code starts at 248, and subnormal numbers reach 7 / 512.
    """
    held = x.clamp(max=float(get_format("ue4m3").max))
    normal = (held.view(torch.int32) + (1 << 19) >> 20) - (120 << 3)
    small = truncated(held * 512 + 0.5).to(torch.int32).clamp(max=7)
    code = torch.where(held < 2.0**-6, small, torch.where(normal < 0x78, normal, 0x7E))
    return torch.where(x > 0, code, 0)
