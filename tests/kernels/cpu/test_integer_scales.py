"""Scales that fit integers in short blocks: which are tried, and the bytes of the reference."""

from __future__ import annotations

import pytest
import torch

import zeropoint as zp
from zeropoint.kernels.cpu.least_error.integer_scales import MOST_RATIOS
from zeropoint.ops.integer_fits import fits_of
from zeropoint.ops.threads import gradual_underflow
from zeropoint.schemes import Scheme

SCHEMES = ("int2:g64", "int3:g96", "int4:g128", "int4:g32", "int4:g16", "int5:g64", "int6:g32", "int8:g128")
COLUMNS = 384


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Return rows of many kinds, whose best scales lie all over the window."""
    make = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, COLUMNS, generator=make)
    kinds = [
        normal, normal**3, normal.abs() ** 9, torch.rand(count, COLUMNS, generator=make) - 0.5,
        torch.randint(-15, 16, (count, COLUMNS), generator=make) / 2, (normal * 2).round() * 0.7,
        torch.where(normal.abs() > 2, 8.0, normal * 0.05), torch.where(normal > 0, 1.0, -0.5) + normal * 1e-3,
        torch.where(normal > 2.5, 1.0, 0.0), normal * 1e-40, normal.clamp(-2, 2) * 1e38,
    ]  # fmt: skip
    return torch.cat(kinds)


def same(x: torch.Tensor, scheme: str) -> bool:
    """Return whether kernels have the codes and scales of the reference."""
    found = []
    for only in (None, "reference"):
        with zp.only_backend(only), gradual_underflow():
            q = zp.quantize(x, f"{scheme}:scale=search")
        found.append([part.view(torch.uint8) for part in (q.data, *q.params.stored)])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_that_are_left_out_change_no_byte(scheme: str) -> None:
    assert same(rows(4), scheme)
    assert same(rows(2, seed=1).bfloat16(), scheme)


@pytest.mark.slow  # a minute of plain torch
@pytest.mark.parametrize("scheme", [*SCHEMES, "int2:g128", "int3:g16", "int4:g48", "int4:g112", "int5:g16"])
def test_scales_that_are_left_out_change_no_byte_of_many_blocks(scheme: str) -> None:
    for seed in range(8):
        assert same(rows(24, seed=10 + seed), scheme)


def test_equal_blocks_of_one_number_keep_their_scales_among_others() -> None:
    # Lanes whose blocks are done get the first scale again, and blocks of zeros none.
    x = rows(4)
    x[1::3, ::2] = 0
    x[2::3] = 0
    assert same(x, "int4:g64")


def test_the_kernel_has_room_for_the_scales_of_all_blocks() -> None:
    counts = [
        len(fits_of(Scheme.parse(f"int{bits}:g{size}"), size).ratios)
        for bits in range(2, 9)
        for size in range(16, 129, 16)
    ]
    assert max(counts) <= MOST_RATIOS
    assert all(count % 2 == 0 for count in counts)
