"""Nodes of a report, rendered as text or HTML.

Headings, sentences, tables and pictures are nodes. Pages, notebook cells and screens share them, so that they
say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from ..shown import Picture
from .table_layout import keyed, plain

_MANY = 25
"""Rows of a table in text."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    text: what it says. value: its number, by which rows are sorted, or None. number: whether it belongs to a
    column of numbers. picture: in place of the text in HTML.
    """

    text: str
    value: float | None = None
    number: bool = False
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence; quiet: an explanation, which text leaves to pages."""

    text: str
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class FactList:
    """Names and facts; large: the first few, as cards."""

    pairs: tuple[tuple[str, str], ...]
    large: bool = False


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table, names first; ``sortable``: pages sort and filter its rows."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its caption, and what its colors mean."""

    picture: Picture
    caption: str = ""
    legend: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FigureRow:
    """Figures next to each other."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes under a title.

    folded: whether a reader opens it first. long: whether short text omits it.
    """

    title: str
    nodes: tuple[Node, ...] = field(default=())
    folded: bool = False
    long: bool = False


Node: TypeAlias = Sentence | FactList | DataTable | Figure | FigureRow | Part


def number_cell(value: float | None, text: str | None = None) -> Cell:
    """Return a cell of a column of numbers."""
    shown = ("" if value is None else f"{value:,}") if text is None else text
    return Cell(shown, value, number=True)


def row(*values: str | float | Cell | None) -> tuple[Cell, ...]:
    """Return the cells of a row of texts and numbers."""
    cells = (Cell(value) if isinstance(value, str) else value for value in values)
    return tuple(cell if isinstance(cell, Cell) else number_cell(cell) for cell in cells)


def every(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield all nodes, those in parts after the part."""
    for node in nodes:
        yield node
        if isinstance(node, Part):
            yield from every(node.nodes)


def on_screen(nodes: Iterable[Node], *, whole: bool = False) -> RenderableType:
    """Return nodes for rich; ``whole``: with long parts, explanations, all rows."""
    return Group(*_printed(nodes, whole=whole))


def _printed(nodes: Iterable[Node], *, whole: bool) -> Iterator[RenderableType]:
    for node in nodes:
        if isinstance(node, Sentence):
            if whole or not node.quiet:
                yield Text(safe(node.text))
        elif isinstance(node, FactList):
            yield keyed((safe(name), safe(value)) for name, value in node.pairs)
        elif isinstance(node, DataTable):
            yield from _printed_grid(node, whole=whole)
        elif isinstance(node, Part):
            if whole or not node.long:
                yield Text(f"\n{safe(node.title)}", style="bold")
                yield from _printed(node.nodes, whole=whole)
        elif whole:
            figures = node.figures if isinstance(node, FigureRow) else (node,)
            yield from (Text(safe(" ".join((each.caption, *each.legend)))) for each in figures)


def safe(text: str) -> str:
    r"""Return a text with escapes for what could drive a terminal.

    >>> safe("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    escaped = (each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
    return "".join(escaped)


def _printed_grid(node: DataTable, *, whole: bool) -> Iterator[RenderableType]:
    numbers = [n for n, number in enumerate(_numeric(node)) if number]
    table = plain(*map(safe, node.heads), numbers=numbers)
    rows = node.rows if whole else node.rows[:_MANY]
    for row in rows:
        table.add_row(*(safe(cell.text) for cell in row))
    yield table
    if len(rows) < len(node.rows):
        yield Text(f"and {len(node.rows) - len(rows):,} more")


def _numeric(node: DataTable) -> list[bool]:
    return [bool(node.rows) and node.rows[0][n].number for n in range(len(node.heads))]


def as_html(nodes: Iterable[Node], *, level: int = 2) -> str:
    """Return nodes as HTML. level: of the headings of parts."""
    return "".join(_html(node, level) for node in nodes)


def _html(node: Node, level: int) -> str:
    if isinstance(node, Sentence):
        return f"<p{' class=dim' if node.quiet else ''}>{escape(node.text)}</p>\n"
    if isinstance(node, FactList):
        return _facts_html(node)
    if isinstance(node, DataTable):
        return _grid_html(node)
    if isinstance(node, Figure):
        return _figure_html(node)
    if isinstance(node, FigureRow):
        return f"<div class=pair>{''.join(map(_figure_html, node.figures))}</div>\n"
    inner = as_html(node.nodes, level=level + 1)
    if node.folded:
        return f"<details><summary>{escape(node.title)}</summary>{inner}</details>\n"
    return f"<section><h{level}>{escape(node.title)}</h{level}>\n{inner}</section>\n"


def _facts_html(node: FactList) -> str:
    if node.large:
        cards = (
            f"<div><b>{escape(value)}</b> <span>{escape(name)}</span></div>" for name, value in node.pairs
        )
        return f"<div class=cards>{''.join(cards)}</div>\n"
    items = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in node.pairs)
    return f"<dl>{''.join(items)}</dl>\n"


def _figure_html(node: Figure) -> str:
    caption = f"<figcaption>{escape(node.caption)}</figcaption>" if node.caption else ""
    items = (f"<li class=c{n % COLORS}>{escape(kind)}</li>" for n, kind in enumerate(node.legend))
    legend = f"<ul class=legend>{''.join(items)}</ul>" if node.legend else ""
    return f"<figure>{caption}{node.picture.inline}{legend}</figure>\n"


COLORS = 8
"""Series of which each has a color of its own."""


def _grid_html(node: DataTable) -> str:
    numeric = _numeric(node)
    heads = "".join(
        f"<th scope=col{' class=n' if number else ''}>{escape(head)}</th>"
        for head, number in zip(node.heads, numeric, strict=True)
    )
    cells = (
        "".join(_cell_html(cell, first=n == 0, sortable=node.sortable) for n, cell in enumerate(row))
        for row in node.rows
    )
    rows = "".join(f"<tr>{each}</tr>\n" for each in cells)
    kind = " class=sortable" if node.sortable else ""
    # What is wider than the page scrolls by itself, with the keyboard, too.
    region = f'<div class=wide tabindex=0 role=region aria-label="{escape(", ".join(node.heads))}">'
    return f"{region}<table{kind}><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n"


def _cell_html(cell: Cell, *, first: bool, sortable: bool) -> str:
    if cell.picture is not None:
        return f"<td>{cell.picture.inline}</td>"
    text = escape(cell.text)
    if cell.number:
        value = "" if cell.value is None else f"{cell.value:.6g}"
        return f"<td class=n data-v='{value}'>{text}</td>" if sortable else f"<td class=n>{text}</td>"
    # Long names may break behind their dots, and nowhere else.
    return f"<td class=name>{re.sub(r'[.](?=.)', '.<wbr>', text)}</td>" if first else f"<td>{text}</td>"
