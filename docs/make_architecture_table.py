"""Write docs/architectures.md: which architectures transformers loads, and under which schemes.

    python docs/make_architecture_table.py

The answers are those of src/zeropoint/codecs/compressed_tensors/tested.json, which
benchmarks/architectures.py writes. A test compares the file with :func:`page`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeropoint.checkpoint.plan.verdicts import TRANSFORMERS
from zeropoint.codecs.compressed_tensors.tested import TestedModel, rows

PAGE = Path(__file__).with_name("architectures.md")
SHOWN = ("w4a16", "w8a16", "w8a8", "fp8_dynamic", "mxfp4a16", "nvfp4a16")
HEAD = f"""# Architectures

<!-- Made by benchmarks/architectures.py from what transformers did; do not edit. -->

Each cell was run: a model of two layers with random weights was saved, quantized and loaded by transformers
{TRANSFORMERS} without missing or unexpected tensors; its weights, and the outputs of a forward, were compared
with those of the same codes written as floats. A third of the models are in float32, a third in bfloat16 and
a third in float16; every second one is in shards. Of vision and audio models that also read text, the forward
takes text where the model allows it, and the weights of all parts are compared.

`zeropoint plan` says "yes" for transformers only where this table does, and otherwise "not checked for this
architecture". `quantize` prints that row where it is not a yes, and refuses what no engine is known to load
unless you add `--force`. A number refers to a note below.

"""


def page(table: Sequence[TestedModel]) -> str:
    """Return the text of docs/architectures.md."""
    notes: dict[str, int] = {}
    text = HEAD + _table(table, SHOWN, notes)
    others = [column for column in table[0]["answers"] if column not in SHOWN] if table else []
    text += "\n## Other layouts\n\n`several` is a recipe with two schemes of weights.\n\n"
    text += _table(table, others, notes)
    text += "\n## Notes\n\n"
    return text + "".join(f"{number}. {_sentence(note)}\n" for note, number in notes.items())


def _table(table: Sequence[TestedModel], columns: Sequence[str], notes: dict[str, int]) -> str:
    lines = ["| Model | Reads | `model_type` | " + " | ".join(f"`{c}`" for c in columns) + " |"]
    lines.append("|---" * (3 + len(columns)) + "|")
    for row in table:
        cells = [_cell(row["answers"][column], notes) for column in columns]
        lines.append("| " + " | ".join([row["name"], row["takes"], f"`{row['model_type']}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(answer: str, notes: dict[str, int]) -> str:
    """Return the first word of an answer, and the number of what follows it."""
    word, _, rest = answer.replace(";", ":", 1).partition(":")
    return f"{word} ({notes.setdefault(rest.strip(), len(notes) + 1)})" if rest else word


def _sentence(note: str) -> str:
    return note[:1].upper() + note[1:] + "."


if __name__ == "__main__":
    PAGE.write_text(page(rows()), encoding="utf-8")
