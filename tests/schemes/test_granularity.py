"""Blocks: their shape and number for every kind of tensor, and the text form of granularities."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropoint.errors import SchemeError, ShapeError
from zeropoint.schemes import Granularity
from zeropoint.schemes.granularity import Anchor

G = Granularity


@pytest.mark.parametrize(
    ("granularity", "shape", "block", "grid"),
    [
        (G.tensor(), (4, 6), (4, 6), (1, 1)),
        (G.tensor(), (7,), (7,), (1,)),
        (G.tensor(), (), (), ()),
        (G.channel(), (4, 6), (1, 6), (4, 1)),
        (G.channel(), (4, 2, 3), (1, 2, 3), (4, 1, 1)),
        (G.channel(1), (4, 2, 3), (4, 1, 3), (1, 2, 1)),
        (G.channel(-1), (4, 2, 3), (4, 2, 1), (1, 1, 3)),
        (G.channel(-2), (4, 2, 3), (4, 1, 3), (1, 2, 1)),
        (G.channel(), (5,), (1,), (5,)),
        (G.channel(-1), (5,), (1,), (5,)),
        (G.token(), (4, 2, 6), (1, 1, 6), (4, 2, 1)),
        (G.token(), (6,), (6,), (1,)),
        (G.group(32), (4, 64), (1, 32), (4, 2)),
        (G.group(32), (4, 70), (1, 32), (4, 3)),
        (G.group(32), (4, 5), (1, 32), (4, 1)),
        (G.group(1), (2, 3), (1, 1), (2, 3)),
        (G.group(2), (5,), (2,), (3,)),
        (G.group(2**40), (2, 3), (1, 2**40), (2, 1)),
        (G.block(128, 128), (256, 384), (128, 128), (2, 3)),
        (G.block(128, 128), (300, 130), (128, 128), (3, 2)),
        (G.block(2, 3), (5, 4, 7), (1, 2, 3), (5, 2, 3)),
        (G(extents=(2,), rest=1, anchor=Anchor.FIRST), (5, 3), (2, 1), (3, 3)),
        (G(rest=1), (2, 3), (1, 1), (2, 3)),
    ],
)
def test_blocks_cover_a_tensor_and_a_partial_block_counts(
    granularity: Granularity, shape: tuple[int, ...], block: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    assert granularity.block_shape(shape) == block
    assert granularity.grid(shape) == grid
    assert granularity.block_count(shape) == math.prod(grid)


@pytest.mark.parametrize(
    ("granularity", "shape", "block", "grid"),
    [
        (G.tensor(), (0,), (1,), (0,)),
        (G.tensor(), (0, 5), (1, 5), (0, 1)),
        (G.channel(), (0, 5), (1, 5), (0, 1)),
        (G.channel(), (5, 0), (1, 1), (5, 0)),
        (G.token(), (5, 0), (1, 1), (5, 0)),
        (G.group(32), (5, 0), (1, 32), (5, 0)),
        (G.block(2, 2), (0, 0), (2, 2), (0, 0)),
    ],
)
def test_an_empty_tensor_has_no_blocks_but_a_block_shape(
    granularity: Granularity, shape: tuple[int, ...], block: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    assert granularity.block_shape(shape) == block
    assert granularity.grid(shape) == grid
    assert granularity.block_count(shape) == 0


@pytest.mark.parametrize(
    ("granularity", "shape", "message"),
    [
        (G.channel(), (), r"granularity channel needs at least 1 axes, got shape \(\)"),
        (G.group(32), (), r"granularity g32 needs at least 1 axes, got shape \(\)"),
        (G.token(), (), r"granularity token needs at least 1 axes, got shape \(\)"),
        (G.channel(2), (3, 4), r"granularity channel2 needs at least 3 axes, got shape \(3, 4\)"),
        (G.channel(-3), (3, 4), r"granularity channel-3 needs at least 3 axes, got shape \(3, 4\)"),
        (G.block(2, 2), (3,), r"granularity block2x2 needs at least 2 axes, got shape \(3,\)"),
    ],
)
def test_a_tensor_with_too_few_axes_is_refused(
    granularity: Granularity, shape: tuple[int, ...], message: str
) -> None:
    for ask in (granularity.block_shape, granularity.grid, granularity.block_count):
        with pytest.raises(ShapeError, match=message):
            ask(shape)


@pytest.mark.parametrize("size", [0, -1, -128])
def test_a_group_without_elements_is_refused(size: int) -> None:
    with pytest.raises(
        SchemeError, match=rf"group size \(={size}\) must be at least 1; use token for one group a row"
    ):
        G.group(size)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (-1, 2)])
def test_a_block_without_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SchemeError, match=r"block shape \(=\(.*\)\) must name at least one positive extent"):
        G.block(*shape)


@pytest.mark.parametrize("axis", [64, -65, 100])
def test_an_axis_that_no_tensor_has_is_refused(axis: int) -> None:
    with pytest.raises(SchemeError, match=rf"channel axis \(={axis}\) must lie in -64\.\.63"):
        G.channel(axis)


def test_negative_extents_and_an_odd_rest_are_refused() -> None:
    with pytest.raises(
        SchemeError, match=r"extents \(=\(-1,\)\) of a block must be positive, or 0 for a whole axis"
    ):
        G(extents=(-1,))
    with pytest.raises(SchemeError, match=r"rest \(=2\) must be 0 \(whole axes\) or 1"):
        G(rest=2)


NAMED = {
    "tensor": G.tensor(),
    "channel": G.channel(),
    "channel1": G.channel(1),
    "channel-1": G.channel(-1),
    "channel63": G.channel(63),
    "token": G.token(),
    "g128": G.group(128),
    "block128x64": G.block(128, 64),
    "first[2,0]rest1": G(extents=(2, 0), rest=1, anchor=Anchor.FIRST),
    "last[]rest1": G(rest=1),
    "first[]rest0": G(anchor=Anchor.FIRST),
}


@pytest.mark.parametrize("text", NAMED)
def test_a_granularity_is_spelled_and_read_back(text: str) -> None:
    assert str(NAMED[text]) == text
    assert Granularity.parse(text) == NAMED[text]


def test_a_one_dimensional_block_is_a_group_and_channel_zero_needs_no_number() -> None:
    assert Granularity.parse("block16") == G.group(16)
    assert Granularity.parse("channel0") == G.channel()


@pytest.mark.parametrize(
    "text",
    [
        "", "g", "g-1", "g1.5", "gx", "G32", "block", "block2x", "blockx2", "block2x-2", "channelx",
        "channel100",
        "tensor ", "first[2]", "last[-1]rest1", "last[2]rest2", "g\uff13", "g" + "9" * 5000,
    ],
)  # fmt: skip
def test_a_text_that_spells_no_granularity_gives_none(text: str) -> None:
    assert Granularity.parse(text) is None


def granularities() -> st.SearchStrategy[Granularity]:
    extents = st.lists(st.integers(0, 300), max_size=4).map(tuple)
    generic = st.builds(
        Granularity, extents=extents, rest=st.sampled_from([0, 1]), anchor=st.sampled_from(Anchor)
    )
    return generic | st.sampled_from(list(NAMED.values())) | st.integers(-64, 63).map(G.channel)


@given(granularities())
def test_every_granularity_can_be_spelled(granularity: Granularity) -> None:
    again = Granularity.parse(str(granularity))
    assert again == granularity
    assert hash(again) == hash(granularity)


@given(granularities(), st.lists(st.integers(0, 7), max_size=5).map(tuple))
def test_every_element_lies_in_exactly_one_block(granularity: Granularity, shape: tuple[int, ...]) -> None:
    if len(granularity.extents) > len(shape):
        with pytest.raises(ShapeError, match="needs at least"):
            granularity.grid(shape)
        return
    block, grid = granularity.block_shape(shape), granularity.grid(shape)
    blocks = {
        tuple(i // extent for i, extent in zip(index, block, strict=True))
        for index in itertools.product(*map(range, shape))
    }
    assert blocks == set(itertools.product(*map(range, grid)) if math.prod(shape) else ())


@pytest.mark.parametrize(("axis", "size"), [(0, 32), (1, 5), (-1, 16), (-2, 32), (-3, 2), (2, 0), (-2, 0)])
def test_blocks_along_an_axis_are_one_wide_in_all_others(axis: int, size: int) -> None:
    shape = (6, 70, 48)
    expected = [1, 1, 1]
    expected[axis] = size or shape[axis]
    assert Granularity.along(axis, size).block_shape(shape) == tuple(expected)
