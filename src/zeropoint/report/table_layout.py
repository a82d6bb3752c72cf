"""Shapes of all tables: frameless columns, readable at 80 columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns that every table fits into where its words allow it."""
_BOX, _GAP = box.SIMPLE_HEAD, "  "
_FIRST = ord("a")
"""A column of a table that is laid out to be measured holds the letter of its number only."""


class Plain:
    """A table with underlined headings, at microseconds per row.

    It looks as rich's own does, which takes about a millisecond a row (rich 14): too long for the tensors of
    a large model. Cells are texts as they stand, never markup.
    """

    def __init__(self, headings: Sequence[str], numbers: Sequence[int], whole: Sequence[int]) -> None:
        self._headings = tuple(headings)
        self._right = [column in numbers for column in range(len(headings))]
        self._whole = [right or column in whole for column, right in enumerate(self._right)]
        self._rows: list[tuple[str, tuple[str, ...]]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row in a rich ``style``; trailing cells may be omitted."""
        self._rows.append((style, cells + ("",) * (len(self._headings) - len(cells))))

    def add_section(self) -> None:
        """Add an empty line."""
        self.add_row()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines in the width that rich gives."""
        widths = self._widths(console, options)
        yield from self._lines(console, widths, "bold", self._headings, bottom=True)
        yield Segment("\u2500" * (sum(widths) + len(_GAP) * (len(widths) - 1)) + "\n")
        for style, cells in self._rows:
            yield from self._lines(console, widths, style, cells)

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Return the widths that rich gives to the widest cells."""
        rows = (self._headings, *(cells for _, cells in self._rows))
        longest = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        probe = Table(box=_BOX, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False)
        probe.show_header = False
        for whole in self._whole:
            probe.add_column(overflow="fold", no_wrap=whole)
        probe.add_row(*(chr(_FIRST + column) * length for column, length in enumerate(longest)))
        first = "".join(segment.text for segment in console.render(probe, options)).partition("\n")[0]
        return [first.count(chr(_FIRST + column)) for column in range(len(longest))]

    def _lines(
        self,
        console: Console,
        widths: Sequence[int],
        style: str,
        cells: Sequence[str],
        *,
        bottom: bool = False,
    ) -> Iterator[Segment]:
        """Yield the lines of a row; wide cells take several.

        bottom: whether shorter cells stand at the last of these lines rather than at the first.
        """
        columns = [
            [cell] if cell_len(cell) <= width else _wrapped(console, cell, width, whole)
            for cell, width, whole in zip(cells, widths, self._whole, strict=True)
        ]
        if bottom:
            height = max(map(len, columns))
            columns = [[""] * (height - len(column)) + column for column in columns]
        for parts in itertools.zip_longest(*columns, fillvalue=""):
            padded = [
                " " * (width - cell_len(part)) + part if right else part + " " * (width - cell_len(part))
                for part, width, right in zip(parts, widths, self._right, strict=True)
            ]
            yield Segment(_GAP.join(padded), console.get_style(style) if style else None)
            yield Segment.line()


def _wrapped(console: Console, cell: str, width: int, whole: bool) -> list[str]:
    """Return the wrapped lines of a cell; none without room."""
    name = cell.lstrip(" ")
    indent = cell[: len(cell) - len(name)]
    if (room := width - len(indent)) <= 0:
        indent, room = "", width
    if not room:
        return []
    parts = name if whole else " ".join(_broken(word, room) for word in name.split(" "))
    lines = Text(parts).wrap(console, room, overflow="fold", no_wrap=whole)
    return [f"{indent}{line.plain.rstrip()}" for line in lines]


def _broken(word: str, width: int) -> str:
    """Return a name broken before dots, no part cut.

    >>> _broken("encoder.layer.attention.output", 15).split()
    ['encoder.layer', '.attention', '.output']
    """
    if cell_len(word) <= width:
        return word
    lines = [""]
    for part in re.split(r"(?<!^)(?=\.)", word):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def plain(*headings: str, numbers: Sequence[int] = (), whole: Sequence[int] = ()) -> Plain:
    """Return an empty table; ``numbers`` align right, and ``whole`` do not wrap."""
    return Plain(headings, numbers, whole)


def keyed(rows: Iterable[tuple[str, str]]) -> Table:
    """Return facts, one a line, with their names in front."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, Text(value))
    return table


def grid(cells: Sequence[str]) -> Table:
    """Return short texts in columns, a power of two, read downwards."""
    width = max(map(len, cells)) + 2
    columns = 1
    while 2 * columns * width <= WIDTH + 2 and 2 * columns <= len(cells) // 2:
        columns *= 2
    height = -(-len(cells) // columns)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for row in range(height):
        table.add_row(*(Text(cell) for cell in cells[row::height]))
    return table
