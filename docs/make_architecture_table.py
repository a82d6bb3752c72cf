"""Which architectures transformers loads, and under which schemes.

The answers are those of src/zeropoint/codecs/compressed_tensors/tested.json, which
benchmarks/architectures.py writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from docs.make_tables import table

from zeropoint.codecs.compressed_tensors.tested import TestedModel, rows

SHOWN = ("w4a16", "w8a16", "w8a8", "fp8_dynamic", "mxfp4a16", "nvfp4a16")


def _others() -> list[str]:
    """Return the columns that are layouts rather than presets."""
    return [column for column in rows()[0]["answers"] if column not in SHOWN]


def presets_table() -> str:
    """Return how much transformers loads of each model under each preset."""
    return _table(rows(), SHOWN, {})


def layouts_table() -> str:
    """Return the same of other layouts; the numbers of notes continue."""
    notes: dict[str, int] = {}
    _table(rows(), SHOWN, notes)
    return _table(rows(), _others(), notes)


def notes_list() -> str:
    """Return the notes of both tables, numbered."""
    notes: dict[str, int] = {}
    for columns in (SHOWN, _others()):
        _table(rows(), columns, notes)
    return "".join(f"{number}. {_sentence(note)}\n" for note, number in notes.items())


def _table(answers: Sequence[TestedModel], columns: Sequence[str], notes: dict[str, int]) -> str:
    cells = [
        [
            row["name"], row["takes"], f"`{row['model_type']}`",
            *(_cell(row["answers"][column], notes) for column in columns),
        ]
        for row in answers
    ]  # fmt: skip
    return table(("Model", "Reads", "`model_type`", *(f"`{column}`" for column in columns)), cells)


def _cell(answer: str, notes: dict[str, int]) -> str:
    """Return the first word of an answer, and the number of what follows it."""
    word, _, rest = answer.replace(";", ":", 1).partition(":")
    return f"{word} ({notes.setdefault(rest.strip(), len(notes) + 1)})" if rest else word


def _sentence(note: str) -> str:
    return note[:1].upper() + note[1:] + "."
