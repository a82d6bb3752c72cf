"""A table looks as rich's own does, at every width, and costs no more than its letters."""

import random

import pytest
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from tests.counting import calls

from zeropoint.report.table_layout import plain

WORDS = ("a", "bc", "model-layers-11-mlp-up_proj-weight", "[bold]", "1,000", "because of", "名前", "x" * 40)
SHORT = ("", "n", "1,000", "名前")


def shown(table: RenderableType, width: int, *, terminal: bool = False) -> str:
    colors = "standard" if terminal else None
    console = Console(width=width, highlight=False, force_terminal=terminal, color_system=colors)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def both(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> tuple[RenderableType, RenderableType]:
    """Return our table and rich's of the same rows; the second column is of numbers, the third is whole."""
    ours = plain(*headings, numbers=(1,), whole=(2,))
    theirs = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False
    )
    for column, heading in enumerate(headings):
        theirs.add_column(
            Text(heading), justify="right" if column == 1 else "left", overflow="fold",
            no_wrap=column in (1, 2), header_style="bold",
        )  # fmt: skip
    for row in rows:
        ours.add_row(*row)
        theirs.add_row(*map(Text, row))
    return ours, theirs


def cell(draw: random.Random, column: int) -> str:
    """Return a cell; what is not wrapped is short, as it is in all our tables."""
    return draw.choice(SHORT) if column in (1, 2) else " ".join(draw.choices(WORDS, k=draw.randint(0, 3)))


@pytest.mark.parametrize("width", [30, 48, 80, 200, 1 << 16])
def test_a_table_looks_as_richs_own_does(width: int) -> None:
    draw = random.Random(width)
    for _ in range(40):
        columns = draw.randint(1, 5)
        headings = tuple(draw.choice(("n", "tensors", "because of")) for _ in range(columns))
        rows = [tuple(cell(draw, column) for column in range(columns)) for _ in range(draw.randint(0, 6))]
        ours, theirs = both(headings, rows)
        assert shown(ours, width) == shown(theirs, width), (headings, rows)


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_name_that_is_longer_than_its_column_is_broken_before_dots_alone(width: int) -> None:
    table = plain("weights", "n", "SQNR dB", numbers=(1, 2))
    names = [f"  encoder.layer.{n}.attention.output.LayerNorm.weight" for n in (0, 11)]
    for number, name in enumerate(names):
        table.add_row(name, str(number), "18.4")
    lines = [line[: max(1, width - 12)].split()[0] for line in shown(table, width).splitlines()[2:]]
    assert "".join(lines) == "".join(names).replace(" ", "")
    assert all(line.startswith((".", "encoder")) for line in lines)


def test_a_name_that_fits_but_for_its_indent_keeps_its_words() -> None:
    table = plain("weights", "n", numbers=(1,))
    table.add_row("  encoder.layer.0.dense.weight", "1")  # 28 letters in a column of 29
    lines = [line[:-1].rstrip() for line in shown(table, 32).splitlines()[2:]]
    assert lines == ["  encoder.layer.0.dense", "  .weight"]


def test_a_terminal_without_room_for_all_columns_gets_those_that_fit() -> None:
    table = plain("weights", "n", "SQNR dB", "largest", numbers=(1, 2, 3))
    table.add_row("model.layers.0", "1", "31.4", "0.25")
    assert all(len(line) <= 12 for line in shown(table, 12).splitlines())


def test_headings_and_headlines_are_bold_on_a_terminal() -> None:
    table = plain("tensors", "n", numbers=(1,))
    table.add_row("kept", "2", style="bold")
    table.add_row("a", "1")
    assert shown(table, 80, terminal=True).splitlines() == [
        "\x1b[1mtensors  n\x1b[0m", "─" * 10, "\x1b[1mkept     2\x1b[0m", "a        1"
    ]  # fmt: skip


def test_a_row_costs_a_fifteenth_of_richs() -> None:
    rows = [(f"model.layers.{n}.mlp.up_proj.weight", str(n), "BF16", "16 x 128") for n in range(20_000)]
    headings = ("tensors", "n", "dtype", "shape")
    ours, _ = both(headings, rows)
    _, theirs = both(headings, rows[:500])  # of 20,000 it takes twenty seconds
    in_a_pipe = calls(lambda: shown(ours, 1 << 16)) / len(rows)
    assert in_a_pipe < calls(lambda: shown(theirs, 1 << 16)) / 500 / 15
    assert in_a_pipe < 100
