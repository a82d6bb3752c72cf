"""Steps of lanes that no search shows well: numbers that lie halfway between two of a narrower type."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from zeropoint.kernels.cpu.least_error.lanes import narrowed
from zeropoint.kernels.cpu.machine.descriptor import TO_BFLOAT16, TO_FLOAT16
from zeropoint.kernels.cpu.machine.vector import load_lanes, store_lanes


@numba.njit
def _narrowed(x: npt.NDArray[np.float32], out: npt.NDArray[np.float32], to: int) -> None:
    for at in range(0, x.size, 16):
        store_lanes(out, np.uint64(at), narrowed(load_lanes(x, np.uint64(at)), np.uint64(to)))


@pytest.mark.parametrize(("to", "dtype"), [(TO_BFLOAT16, torch.bfloat16), (TO_FLOAT16, torch.float16)])
def test_lanes_are_rounded_half_to_even(to: int, dtype: torch.dtype) -> None:
    whole = torch.arange(1, 2049, dtype=torch.int32)
    # Halves of the last place of either type, what lies next to them, and float16 that is not normal.
    ties = torch.cat([(whole << shift) + near for shift in (12, 15) for near in (-1, 0, 1)]) + 0x3F800000
    x = torch.cat([ties.view(torch.float32), -whole * 2.0**-26])
    out = torch.empty_like(x)
    _narrowed(x.numpy(), out.numpy(), int(to))
    assert torch.equal(out, x.to(dtype).float())
