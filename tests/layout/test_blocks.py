"""Blocks against loops over every index."""

from __future__ import annotations

import itertools
import math
import warnings
from fractions import Fraction

import pytest
import torch

from zeropoint import Granularity, ShapeError
from zeropoint.layout.blocks import (
    mean_blocks,
    pairwise_sums,
    reduce_blocks,
    signed_largest,
    spread_blocks,
    spread_grid,
    sum_blocks,
)

CASES = [
    (Granularity.tensor(), (3, 5)),
    (Granularity.tensor(), ()),
    (Granularity.channel(0), (3, 5)),
    (Granularity.channel(1), (3, 5, 2)),
    (Granularity.channel(-1), (3, 5)),
    (Granularity.token(), (2, 3, 5)),
    (Granularity.group(4), (2, 10)),
    (Granularity.group(7), (5,)),
    (Granularity.group(1), (2, 3)),
    (Granularity.block(2, 3), (5, 7)),
    (Granularity.block(2, 3), (2, 5, 7)),
    (Granularity.block(128, 128), (3, 4)),
    (Granularity.block(2, 2, 2), (3, 3, 3)),
]


def block_of(index: tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i // e for i, e in zip(index, extents, strict=True))


def indices(shape: tuple[int, ...]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


@pytest.mark.crossed
@pytest.mark.parametrize(("granularity", "shape"), CASES)
@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_each_block_is_reduced_over_its_own_elements_only(
    granularity: Granularity, shape: tuple[int, ...], kind: str
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    extents = granularity.block_shape(shape)
    members: dict[tuple[int, ...], list[float]] = {}
    for index in indices(shape):
        members.setdefault(block_of(index, extents), []).append(float(x[index]))
    fill = -math.inf if kind == "amax" else math.inf
    reduced = reduce_blocks(x, granularity, kind, fill)
    assert tuple(reduced.shape) == granularity.grid(shape)
    choose = max if kind == "amax" else min
    assert {i: float(reduced[i]) for i in members} == {i: choose(v) for i, v in members.items()}


@pytest.mark.parametrize(("granularity", "shape"), CASES)
def test_the_value_of_each_block_is_spread_over_its_elements(
    granularity: Granularity, shape: tuple[int, ...]
) -> None:
    grid = granularity.grid(shape)
    values = torch.arange(math.prod(grid)).reshape(grid)
    spread = spread_blocks(values, granularity, shape).expand(shape)
    extents = granularity.block_shape(shape)
    assert all(int(spread[i]) == int(values[block_of(i, extents)]) for i in indices(shape))


@pytest.mark.parametrize(
    ("coarse", "fine", "shape"),
    [
        (Granularity.group(16), Granularity.group(2), (3, 37)),
        (Granularity.tensor(), Granularity.group(16), (2, 40)),
        (Granularity.channel(0), Granularity.group(5), (4, 12)),
        (Granularity.block(4, 6), Granularity.block(2, 3), (7, 13)),
        (Granularity.group(3), Granularity.group(3), (2, 8)),
    ],
)
def test_a_coarse_value_reaches_every_fine_block_inside(
    coarse: Granularity, fine: Granularity, shape: tuple[int, ...]
) -> None:
    grid = coarse.grid(shape)
    values = torch.arange(math.prod(grid)).reshape(grid)
    spread = spread_grid(values, coarse, fine, shape)
    assert tuple(spread.shape) == fine.grid(shape)
    small, big = fine.block_shape(shape), coarse.block_shape(shape)
    for index in indices(shape):
        assert int(spread[block_of(index, small)]) == int(values[block_of(index, big)])


def test_coarse_blocks_that_cut_fine_ones_are_refused() -> None:
    with pytest.raises(
        ShapeError, match="blocks of g12 must be made of whole blocks of g8 in a tensor of shape"
    ):
        spread_grid(torch.ones(2, 2), Granularity.group(12), Granularity.group(8), (2, 24))


@pytest.mark.crossed
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
@pytest.mark.parametrize(
    "granularity", [Granularity.tensor(), Granularity.channel(0), Granularity.token(), Granularity.group(4)]
)
def test_an_empty_tensor_has_an_empty_grid_of_blocks(
    granularity: Granularity, shape: tuple[int, ...]
) -> None:
    reduced = reduce_blocks(torch.zeros(shape), granularity, "amax", -math.inf)
    assert tuple(reduced.shape) == granularity.grid(shape)
    assert reduced.numel() == 0
    assert spread_blocks(reduced, granularity, shape).expand(shape).shape == shape


def test_a_partial_block_is_not_changed_by_what_pads_it() -> None:
    x = torch.tensor([[-5.0, -4.0, -3.0]])
    assert reduce_blocks(x, Granularity.group(2), "amax", -math.inf).tolist() == [[-4.0, -3.0]]
    assert reduce_blocks(-x, Granularity.group(2), "amin", math.inf).tolist() == [[4.0, 3.0]]


def test_a_tensor_with_fewer_axes_than_the_blocks_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"granularity block2x2 needs at least 2 axes, got shape \(4,\)"):
        reduce_blocks(torch.zeros(4), Granularity.block(2, 2), "amax", -math.inf)


@pytest.mark.parametrize("size", range(1, 18))
def test_pairwise_sums_count_each_value_once_whatever_the_length_of_a_block(size: int) -> None:
    x = torch.arange(1.0, 35.0).reshape(2, 17)  # whole numbers, whose sums are exact in any order
    assert torch.equal(pairwise_sums(x, Granularity.group(size)), sum_blocks(x, Granularity.group(size)))


def test_of_equal_magnitudes_the_first_in_the_block_gives_the_sign() -> None:
    x = torch.tensor([[3.0, -3.0, -2.0, 2.0, 1.0, -1.0], [-3.0, 3.0, 0.0, -0.5, 0.5, 0.25]])
    assert signed_largest(x, Granularity.group(2)).tolist() == [[3.0, -2.0, 1.0], [-3.0, -0.5, 0.5]]
    assert signed_largest(x, Granularity.channel(0)).tolist() == [[3.0], [-3.0]]


def test_means_of_the_largest_float64_are_finite_and_raise_no_warning() -> None:
    rows = [[1.5e308, 1.0e308, 1.4e308], [-1.7e308, -1.7e308, 1.0], [4e306, 4e305, 1e306]]
    x = torch.tensor(rows, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mean_blocks(x, Granularity.channel(0)).flatten().tolist()
    assert found == [float(sum(map(Fraction, row)) / 3) for row in rows[:2]] + [math.fsum(rows[2]) / 3]
