"""Fuzz the parsers of files: headers, indexes, configurations, layouts, containers, recipes, plans, journals.

    python -m tests.hostile.fuzz [--minutes 10] [--seed 0] [--only NAME]

Prints how many inputs each parser was given and what happened to them. The process ends, with the input on
the screen, when a parser raises anything but ZeropointError, when it accepts or refuses a safetensors file
that the library does not but for the documented list, when one input takes more than CPU_SECONDS of processor
time, or when all together take more memory than `limited.limit` allows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors
from tests.hostile.container_targets import CONTAINER_TARGETS
from tests.hostile.directories import DIRECTORIES, INDEX, SHARDED
from tests.hostile.files import FILES, GOOD
from tests.hostile.layout_targets import LAYOUT_TARGETS
from tests.hostile.mutations import mutate, mutate_file
from tests.hostile.quantized import CONFIG, QUANTIZED, WEIGHTS
from tests.hostile.target import Target, in_directory, refusal

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.config_and_index import MANIFEST
from zeropoint.checkpoint.plan.file import PlanFile
from zeropoint.checkpoint.plan.plan_document import plan_document
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.safetensors_file import parse_header
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.journal import Journal
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.integrity import read_manifest
from zeropoint.errors import CheckpointError
from zeropoint.recipes.document import load_recipe

CPU_SECONDS = 20
"""Of processor time for one input, most of which take less than a millisecond."""
# What safetensors takes and is refused here, by our message; the docstring of safetensors_file.py says why.
DOCUMENTED = re.compile(
    r"appears twice in one object|has the unknown keys|but must be an object|has the unknown dtype \{"
    r"|overflows 63 bits|bytes, above the limit of 4096"
)


def repeats_a_name(content: bytes) -> bool:
    """Return whether a header names a tensor twice: the library looks at the last of the two alone."""
    repeated = []

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeated.append(len(pairs) > len(dict(pairs)))
        return dict(pairs)

    json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")], object_pairs_hook=build)
    return any(repeated)


def header_target(folder: Path) -> Target:
    """Headers of safetensors files, with the library as the judge."""
    path = folder / "x.safetensors"

    def decide(content: bytes) -> str:
        path.write_bytes(content)
        try:
            theirs = dict(safetensors.deserialize(content))
        except safetensors.SafetensorError:
            theirs = None
        message = refusal(parse_header, path)
        if message is not None:
            documented = theirs is None or DOCUMENTED.search(message) or repeats_a_name(content)
            assert documented, f"the library accepts it: {message}"
            return "refused" if theirs is None else "documented"
        assert theirs is not None, "the library refuses it"
        header = parse_header(path)
        found = {e.name: (e.dtype, list(e.shape), content[e.begin :][: e.nbytes]) for e in header.entries}
        assert found == {n: (v["dtype"], v["shape"], bytes(v["data"])) for n, v in theirs.items()}
        return "accepted"

    small = [c.content for c in FILES if isinstance(c.content, bytes) and len(c.content) < 2000]
    # What is well formed comes as often as all that is not.
    seeds = [*small, *([GOOD] * (len(small) // 2))]
    return Target(name="header", seeds=seeds, decide=decide, mutate=mutate_file)


def index_target(folder: Path) -> Target:
    """Indexes of shards."""
    for name, content in SHARDED.items():
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)
    found = [c.content[INDEX] for c in DIRECTORIES if c.topic in ("index", "shards") and INDEX in c.content]  # type: ignore[index]
    seeds = [content for content in found if isinstance(content, bytes) and len(content) < 4000]
    return Target(name="index", seeds=seeds, decide=in_directory(folder, INDEX, open_source))


def config_target(folder: Path) -> Target:
    """Configurations of quantized checkpoints: read, matched with layers, and summed up by inspect."""
    from safetensors.torch import save_file

    save_file(WEIGHTS, folder / "model.safetensors")
    found = [case.content["config.json"] for case in QUANTIZED]  # type: ignore[index]
    seeds = [c for c in found if isinstance(c, bytes) and len(c) < 4000]
    seeds += [json.dumps({"quantization_config": CONFIG}).encode()] * (len(seeds) // 2)

    def judge(place: Path) -> None:
        problems = inspect_checkpoint(place).problems
        if problems:
            raise CheckpointError("; ".join(problems))

    return Target(name="config", seeds=seeds, decide=in_directory(folder, "config.json", judge))


_RECIPE = b"""default: w4a16
rules:
  - name: "*.lm_head"
    keep: logits are sensitive
  - type: [Linear, Conv2d]
    shape: "...,%128"
    weight: int4:g128
    input: int8:token dynamic
"""


def recipe_target(folder: Path) -> Target:
    """Recipes in YAML."""
    seeds = [
        _RECIPE,
        b"default: keep\nrules: []\n",
        b'default: &a w8a8\nrules:\n- {name: "re:.*", preset: *a}\n',
    ]
    return Target(
        name="recipe",
        seeds=seeds,
        decide=in_directory(folder, "r.yaml", lambda p: load_recipe(p / "r.yaml")),
    )


def manifest_target(folder: Path) -> Target:
    """Manifests of outputs; half of them get the hash of what they became, or none would pass."""
    for name, content in SHARDED.items():
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)
    source = open_source(folder)
    part = [[0, 8, "00" * 32]]
    table = {"format": 1, "files": {INDEX: {"size": 8, "parts": part}, "x": {"size": 1, "header": "00"}},
             "tensors": {"a": {"file": "x", "parts": part}}}  # fmt: skip
    seeds = [json.dumps(table).encode()[:-1] + b",", json.dumps(table, indent=0).encode()[:-2] + b",\n"]

    def sealed(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
        changed = mutate(content, rng, others)
        of = changed if rng.random() < 0.5 else content
        return changed + f'"sha256": "{hashlib.sha256(of).hexdigest()}"}}'.encode()

    decide = in_directory(folder, MANIFEST, lambda _: read_manifest(source))
    return Target(name="manifest", seeds=seeds, decide=decide, mutate=sealed)


def journal_target(folder: Path) -> Target:
    """Journals of runs: of whatever is there, what is taken is the beginning of what was written."""
    path = folder / "journal"
    written = Journal(path)
    written.append([{"identity": {"a": "0" * 64}, "stamps": {}, "files": ["x"]}])
    for number in range(8):
        written.append(
            [{"unit": number, "digests": [f"{number:064x}"], "error": None}, {"shard": str(number)}]
        )
    written.close()
    raw = path.read_bytes()
    path.unlink()

    def decide(content: bytes) -> str:
        path.write_bytes(content)
        journal = Journal(path)
        found = journal.records
        journal.close()
        assert found == _as_written(raw)[: len(found)], "a record that was not written, or not there"
        assert raw.startswith(path.read_bytes()), "what is left is no beginning of what was written"
        return "refused" if len(found) < len(_as_written(raw)) else "accepted"

    return Target(name="journal", seeds=[raw], decide=decide)


def plan_target(folder: Path) -> Target:
    """Plan files: what is taken comes out as the plan that was written."""
    for name, content in SHARDED.items():
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)
    source = open_source(folder)
    plans = [
        make_plan(source, "int8:channel", selection=selection)
        for selection in (Selection(), Selection(ignore=("re:a.*",), include=("b",), strict=True))
    ]
    seeds = [
        json.dumps(plan_document(plan), indent=indent).encode() for plan in plans for indent in (1, None)
    ]

    def judge(place: Path) -> None:
        assert PlanFile.read(place / "p.json").remake(source).shards in [plan.shards for plan in plans]

    return Target(name="plan", seeds=seeds, decide=in_directory(folder, "p.json", judge))


def _as_written(raw: bytes) -> list[object]:
    """Return the records of a whole journal: the JSON of each line behind its length and CRC."""
    return [json.loads(line[18:]) for line in raw.splitlines()]


SLOW_TARGETS = (*CONTAINER_TARGETS, *LAYOUT_TARGETS)
"""Those that decode a checkpoint for each input, at some milliseconds."""
TARGETS = (
    header_target, index_target, config_target, recipe_target, plan_target, manifest_target, journal_target,
    *SLOW_TARGETS,
)  # fmt: skip


class Hang(BaseException):
    """Raised by the clock of processor time; no Exception, so that no parser catches it."""


def fuzz(target: Target, rng: random.Random, rounds: Iterator[object]) -> Counter[str]:
    """Give a parser one changed input for each item of ``rounds``; return what happened to them.

    Raises AssertionError, with the input in its notes, at the first that breaks a rule.
    """

    def ring(number: int, frame: object) -> None:
        raise Hang

    tally: Counter[str] = Counter()
    before = signal.signal(signal.SIGVTALRM, ring)
    pool = list(target.seeds)
    try:
        for _ in rounds:
            content = target.mutate(rng.choice(pool), rng, pool)
            if len(content) > 1 << 16:
                continue
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
            try:
                tally[target.decide(content)] += 1
            except BaseException as error:
                error.add_note(f"{target.name}: {content!r}")
                raise
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return tally


def _until(end: float) -> Iterator[None]:
    while time.monotonic() < end:
        yield None


def main() -> None:
    """Fuzz each parser for its share of the time, and print what happened to its inputs."""
    from tests.hostile.limited import MORE_SECONDS, limit

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    limit(60 * options.minutes + MORE_SECONDS)
    chosen = [make for make in TARGETS if make.__name__.startswith(options.only)]
    share = 60 * options.minutes / len(chosen)
    for make in chosen:
        with tempfile.TemporaryDirectory() as folder:
            target = make(Path(folder))
            tally = fuzz(target, random.Random(options.seed), _until(time.monotonic() + share))
        counts = ", ".join(f"{count} {word}" for word, count in sorted(tally.items()))
        sys.stdout.write(f"{target.name}: {tally.total()} inputs: {counts}; no crash, no hang\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
