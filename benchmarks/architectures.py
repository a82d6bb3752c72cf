"""Try models of transformers under several schemes, and write the results.

    python benchmarks/architectures.py [MODEL ...]
    python benchmarks/architectures.py --all [--only TYPE,TYPE] [--anew]

Models of two layers with random weights are written, quantized, loaded by transformers and run; their
weights and outputs are compared with those of the same codes written as floats.

Without ``--all``, they are the models of tests/architectures/zoo.py, in float32, bfloat16 and float16 in turn
and every second one in shards: src/zeropoint/codecs/compressed_tensors/tested.json is made from the answers.
With it, they are all architectures of the transformers that is installed, each made small by the names of its
sizes, in float32 and in a process of its own: swept.csv next to the other file. Rows that are there are not
run again, unless ``--only`` names them or ``--anew`` drops all. docs/reference/architectures.md is made from
both.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 (the tree's root comes first)
from docs.make_pages import FOLDER, renewed  # noqa: E402
from tests.architectures import sweep  # noqa: E402
from tests.architectures.shrunk import class_of, classes  # noqa: E402
from tests.architectures.trial import COLUMNS, save, tried  # noqa: E402
from tests.architectures.zoo import DTYPES, ZOO  # noqa: E402

from zeropoint.codecs.compressed_tensors.tested import SWEPT, TABLE, TestedModel, rows, swept  # noqa: E402
from zeropoint.errors import ZeropointError  # noqa: E402

PAGE = FOLDER / "reference" / "architectures.md"
SECONDS, GIBIBYTES = 60, 5
"""What the process of one architecture may take of the processor and of memory."""
FIRST = "llama"
"""Run before others, so that all processes have what they import and compile."""


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


def try_zoo(named: Collection[str]) -> None:
    """Run all models of the zoo, or the named ones, one after the other."""
    known = {row["name"]: row for row in rows()}
    TABLE.write_text("[]\n", encoding="utf-8")  # what was found before answers nothing
    for number, animal in enumerate(ZOO):
        if animal.name in named or not named:
            with tempfile.TemporaryDirectory() as folder:
                known[animal.name] = answers(number, Path(folder))
    table = [known[animal.name] for animal in ZOO]
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def try_all(only: Collection[str], *, anew: bool) -> None:
    """Run every architecture that has no row yet, or the named ones."""
    known = {} if anew else {row["model_type"]: row for row in swept()}
    left = [kind for kind in classes() if (kind in only if only else kind not in known)]
    # What was found before answers nothing.
    write({kind: row for kind, row in known.items() if kind not in left})
    with tempfile.TemporaryDirectory() as folder:
        sweep.row_of(FIRST, Path(folder))
    for kind in left:
        known[kind] = in_a_process(kind)
        write(known)
        print(*known[kind].values(), sep=", ", flush=True)


def write(known: Mapping[str, Mapping[str, str]]) -> None:
    """Write the table whole, so that a run that is killed resumes from it."""
    new = SWEPT.with_suffix(".new")
    with new.open("w", encoding="utf-8", newline="") as lines:
        table = csv.DictWriter(lines, sweep.FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(known[kind] for kind in sorted(known))
    new.replace(SWEPT)


def in_a_process(kind: str) -> dict[str, str]:
    """Return the row of an architecture, which is run in a fork of this process."""
    forks = multiprocessing.get_context("fork")
    reader, writer = forks.Pipe(duplex=False)
    child = forks.Process(target=run_one, args=(kind, writer))
    child.start()
    writer.close()
    try:
        row: dict[str, str] = reader.recv()
    except EOFError:
        child.join()
        problem = f"not tried: its process ended with {child.exitcode}, or took {SECONDS} s of the processor"
        row = dict.fromkeys(sweep.FIELDS, "") | {
            "model_type": kind, "class": class_of(kind), "compared": problem,
        }  # fmt: skip
    child.join()
    return row


def run_one(kind: str, answer: Connection) -> None:
    """Send the row of an architecture."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (GIBIBYTES << 30, GIBIBYTES << 30))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    with tempfile.TemporaryDirectory() as folder:
        answer.send(sweep.row_of(kind, Path(folder)))


def main(arguments: Sequence[str]) -> None:
    """Run what the arguments name, and renew the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--anew", action="store_true")
    given = parser.parse_args(arguments)
    if given.only and given.anew:
        parser.error("--only names the rows that are run again; leave out --anew, which drops all")
    torch.set_num_threads(1)
    if given.all:
        try_all([kind for kind in given.only.split(",") if kind], anew=given.anew)
    else:
        try_zoo(given.models)
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
