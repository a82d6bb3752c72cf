"""The few shapes that all tables share: columns without frames, readable at 80 columns and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns that every table fits into where its words allow it."""


def plain(*headings: str, numbers: Sequence[int] = ()) -> Table:
    """Return an empty table with a line under its headings; ``numbers`` are the columns aligned right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False)
    for number, heading in enumerate(headings):
        right = number in numbers
        table.add_column(
            heading, justify="right" if right else "left", overflow="fold", no_wrap=right, header_style="bold"
        )
    return table


def keyed(rows: Iterable[tuple[str, str]]) -> Table:
    """Return facts, one a line, with their names in front."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, Text(value))
    return table


def grid(cells: Sequence[str]) -> Table:
    """Return short texts in columns, read downwards, with a power of two of columns."""
    width = max(map(len, cells)) + 2
    columns = 1
    while 2 * columns * width <= WIDTH + 2 and 2 * columns <= len(cells) // 2:
        columns *= 2
    height = -(-len(cells) // columns)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for row in range(height):
        table.add_row(*(Text(cell) for cell in cells[row::height]))
    return table
