"""Try every model of the zoo under every scheme, and write the results.

    python benchmarks/architectures.py [MODEL ...]

Models of two layers with random weights, in float32, bfloat16 and float16 in turn and every second one in
shards, are written, quantized, loaded by transformers and run; their weights and outputs are compared with
those of the same codes written as floats. src/zeropoint/codecs/compressed_tensors/tested.json and
docs/reference/architectures.md are made from the answers. Models that are not named keep theirs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 (the tree's root comes first)
from docs.make_pages import FOLDER, renewed  # noqa: E402
from tests.architectures.trial import COLUMNS, save, tried  # noqa: E402
from tests.architectures.zoo import DTYPES, ZOO  # noqa: E402

from zeropoint.codecs.compressed_tensors.tested import TABLE, TestedModel, rows  # noqa: E402
from zeropoint.errors import ZeropointError  # noqa: E402

PAGE = FOLDER / "reference" / "architectures.md"


def answers(number: int, folder: Path) -> TestedModel:
    """Return the row of one model."""
    animal = ZOO[number]
    source = save(animal, folder / "in", DTYPES[number % len(DTYPES)], sharded=number % 2 == 1)
    found = {}
    for column in COLUMNS:
        try:
            found[column] = tried(animal, source, column, folder / str(len(found))).answer
        except ZeropointError as error:
            found[column] = f"refused: {error}"
        print(f"{animal.name}, {column}: {found[column]}", flush=True)
    kind = json.loads((source / "config.json").read_text())["model_type"]
    return TestedModel(name=animal.name, takes=animal.kind, model_type=kind, answers=found)


def main(named: Sequence[str]) -> None:
    """Run all of them, or those that are named, in one process and one after the other."""
    torch.set_num_threads(1)
    known = {row["name"]: row for row in rows()}
    TABLE.write_text("[]\n", encoding="utf-8")  # what was found before answers nothing
    for number, animal in enumerate(ZOO):
        if animal.name in named or not named:
            with tempfile.TemporaryDirectory() as folder:
                known[animal.name] = answers(number, Path(folder))
    table = [known[animal.name] for animal in ZOO]
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
