"""Lines of words against the codes themselves, one by one, and the kernel against plain torch."""

import pytest
import torch

from zeropoint import Scheme, only_backend
from zeropoint.codecs.words import rows_of_words, words_of_rows
from zeropoint.layout.word_lines import WordLines, from_lines, to_lines

PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
FLIP = 0x89ABCDEF
ALONG, ACROSS = WordLines(flip=FLIP), WordLines(places=PLACES, flip=FLIP)
SCHEME = Scheme.parse("uint4")
SHAPES = [(8, 8), (8, 16), (24, 40), (128, 128), (136, 264), (264, 8), (1024, 48), (16, 2056)]
"""Fewer rows and words than the kernel takes at once, as many, and more."""


def nibbles(rows: int, columns: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows * 5000 + columns)
    return torch.randint(0, 16, (rows, columns), generator=generator).tolist()


def packed(codes: list[list[int]]) -> torch.Tensor:
    pairs = [[low | high << 4 for low, high in zip(row[::2], row[1::2], strict=True)] for row in codes]
    return torch.tensor(pairs, dtype=torch.uint8)


def words(lines: torch.Tensor) -> list[list[int]]:
    return [[word % (1 << 32) for word in line] for line in lines.tolist()]


def word(fields: list[int]) -> int:
    return sum(field << (4 * n) for n, field in enumerate(fields)) ^ FLIP


@pytest.mark.crossed
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_word_holds_neighbors_of_a_row_or_rows_of_a_column(backend: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    codes = nibbles(rows, columns)
    with only_backend(backend):
        along = words_of_rows(packed(codes), SCHEME, shape, ALONG)
        across = words_of_rows(packed(codes), SCHEME, shape, ACROSS)
    assert along.dtype == across.dtype == torch.int32
    assert words(along) == [[word(row[at : at + 8]) for row in codes] for at in range(0, columns, 8)]
    assert words(across) == [
        [word([codes[top + place][column] for place in PLACES]) for top in range(0, rows, 8)]
        for column in range(columns)
    ]


@pytest.mark.crossed
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", [ALONG, ACROSS], ids=["along", "across"])
def test_lines_become_the_rows_that_they_were(backend: str, shape: tuple[int, int], order: WordLines) -> None:
    data = packed(nibbles(*shape))
    lines = to_lines(data, order)
    assert torch.equal(from_lines(lines, order), data)
    with only_backend(backend):
        assert torch.equal(rows_of_words(lines, SCHEME, shape, order), data)


def test_threads_share_the_words_of_rows() -> None:
    shape = (512, 2048)
    data = packed(nibbles(64, shape[1])).repeat(8, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for order in (ALONG, ACROSS):
            lines = words_of_rows(data, SCHEME, shape, order)
            assert torch.equal(lines, to_lines(data, order))
            assert torch.equal(rows_of_words(lines, SCHEME, shape, order), data)
    finally:
        torch.set_num_threads(before)


def test_rows_that_end_within_a_word_fill_bytes_across() -> None:
    codes = nibbles(16, 6)
    lines = words_of_rows(packed(codes)[:, :3], SCHEME, (16, 5), ACROSS)
    assert words(lines) == [
        [word([codes[top + place][column] for place in PLACES]) for top in (0, 8)] for column in range(5)
    ]
    back = rows_of_words(lines, SCHEME, (16, 5), ACROSS)
    codes = [[*row[:5], FLIP >> 4 * PLACES.index(n % 8) & 0xF] for n, row in enumerate(codes)]
    assert torch.equal(back, packed(codes))
