"""Which architectures transformers loads, and under which schemes.

The answers are those of tested.json and swept.csv in src/zeropoint/codecs/compressed_tensors, which
benchmarks/architectures.py writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from docs.make_tables import code, table

from zeropoint.codecs.compressed_tensors.tested import SWEPT_COLUMNS, TEXT_ALONE, TestedModel, rows, swept

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


_SWEPT = (*SWEPT_COLUMNS, "gptq")
_WORKS = ("yes", "partly")
_WHERE = "where "
"""What the reason of a yes begins with that holds with an option alone."""
_WORDS = (*_WORKS, "no", "refused", "nothing written")


def every_counts() -> str:
    """Return how many of all architectures load, by scheme."""
    tried = _tried()
    words = {column: Counter(row[column].partition(":")[0] for row in tried) for column in _SWEPT}
    used = [word for word in _WORDS if any(found[word] for found in words.values())]
    cells = [[code(column), *(str(found[word]) for word in used)] for column, found in words.items()]
    return table(("Scheme", *(word.capitalize() for word in used)), cells)


def every_reason() -> str:
    """Return why some of all architectures do not load, or with an option alone, with their model types."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in _tried():
        for column in _SWEPT:
            word, _, reason = row[column].partition(": ")
            if word not in _WORKS or reason.startswith(_WHERE):
                found.setdefault(_kind(reason), {}).setdefault(row["model_type"], []).append(column)
    whole = len(_SWEPT)
    return _reasons(found, lambda columns: f" ({', '.join(columns)})" if len(columns) < whole else "")


def every_other() -> str:
    """Return the architectures that were not tried, and those whose weights alone were compared."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in swept():
        word, _, reason = row["compared"].partition(": ")
        if word == "weights":
            found.setdefault(f"{word} alone: no inputs of its forward were found", {})[row["model_type"]] = []
        elif word != "outputs":
            found.setdefault(f"{word}: {_kind(reason)}", {})[row["model_type"]] = []
    return _reasons(found, lambda _: "")


def every_total() -> str:
    """Return what was done, in a sentence."""
    words = Counter(row["compared"].partition(":")[0] for row in swept())
    return (
        f"Of {words.total()} model types, {words['outputs'] + words['weights']} were tried: the outputs of "
        f"{words['outputs']} were compared, of {words['weights']} the weights alone.\n"
    )


def _tried() -> list[dict[str, str]]:
    return [row for row in swept() if row["compared"].partition(":")[0] in ("outputs", "weights")]


def _kind(reason: str) -> str:
    """Return a reason without names and numbers of one model."""
    for kind, start in _KINDS.items():
        if start in reason:
            return kind
    return _NAME.sub("a weight", reason.partition(";")[0] if not reason.startswith(_WHERE) else reason)


_NAME = re.compile(r"'[^']*'|(?<=of )\S+(?=, which)|[\w.]+(?= is no linear layer)|\S+(?= \(\d+ in all)")
"""The names of weights in reasons."""
_KINDS = {
    "a package is not installed here": "library",
    "no linear weight in it": "nothing would be quantized",
    "its sizes do not shrink alone": "Error: ",
    f"it {TEXT_ALONE}, and another input is the main one here": TEXT_ALONE,
}
"""Reasons of many models, and a part of their text."""


def _reasons(found: Mapping[str, Mapping[str, Sequence[str]]], ends: Callable[[Sequence[str]], str]) -> str:
    """Return a table of reasons, those of most models first."""
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    cells = [
        [
            reason[:1].upper() + reason[1:],
            str(len(models)),
            ", ".join(code(name) + ends(columns) for name, columns in models.items()),
        ]
        for reason, models in ordered
    ]
    return table(("Reason", "Models", "`model_type`"), cells)


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
