"""Kernels that call the functions of rounding alone; loaded where Triton's interpreter is asked for."""

import triton
import triton.language as tl

from zeropoint.kernels.triton.programs.rounding_modes import noise_of, piece_noise, rounded_to


@triton.jit
def round_numbers(numbers, noise, out, k: tl.constexpr, size: tl.constexpr):
    """Write float32 numbers rounded to integers."""
    at = tl.arange(0, size)
    tl.store(out + at, rounded_to(tl.load(numbers + at), 1.0, 1.0, tl.load(noise + at), k))


@triton.jit(do_not_specialize=["seed", "eighth"])
def noise_from(out, seed, eighth, k: tl.constexpr, size: tl.constexpr):
    """Write the noise of ``size`` elements from eight times ``eighth`` on, in both ways there are."""
    start = eighth.to(tl.int64) * 8
    at = tl.arange(0, size)
    tl.store(out + at, noise_of(seed, start, at, k))
    pieces = tl.arange(0, size // 8)[:, None] * 8
    places = size + pieces + tl.arange(0, 8)[None, :]
    tl.store(out + places, piece_noise(seed, start, pieces, k))
