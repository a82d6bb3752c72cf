"""Plant bugs one at a time, each in a copy of the tree, and say which test sees it.

``python -m tests.mutants`` runs all; it ends with an error where a test sees a bug not, or fails without it.
"""

import argparse
import concurrent.futures
import contextlib
import json
import queue
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .mutant import ROOT, DoesNotApplyError, Mutant, catalog
from .tree import Outcome, Tree, copied, end_all, tree_hash

KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the tests said of one bug."""

    name: str
    room: str
    verdict: str
    by: str = ""
    seconds: float = 0.0
    key: str = ""

    def line(self) -> str:
        """Return the result as a row of a table in Markdown."""
        by = f"`{self.by}`".replace("|", r"\|") if self.by else ""
        return f"| {self.room} | {self.name} | {self.verdict} | {by} | {self.seconds:.0f} |"


def judged(outcome: Outcome, tree: Tree) -> tuple[str, str]:
    """Return the verdict on a bug, and the test that saw it."""
    foreign = [file for file in outcome.package if not file.startswith(f"{tree.root}/")]
    if foreign:
        return f"another copy was tested: {foreign[0]}", ""
    if outcome.broken:
        return "not a bug that tests can see: tests are not collected", outcome.broken[0]
    if outcome.failed:
        return KILLED, outcome.failed[0]
    if outcome.passed:
        return f"survived {len(outcome.passed)} tests", ""
    return f"no tests ran: {outcome.output[-300:].strip()!r}", ""


def tried(mutant: Mutant, tree: Tree) -> tuple[str, str]:
    """Return the verdict on a bug once it is planted, and the test that saw it."""
    tests = [test for test in mutant.tests if (tree.root / test.partition("::")[0]).exists()]
    if not tests:
        return "no tests ran: none of them is there", ""
    try:
        with tree.planted(mutant):
            return judged(tree.outcome(tests, own_kernels=mutant.is_compiled), tree)
    except DoesNotApplyError as error:
        return f"does not apply: {error}", ""
    except TimeoutError as error:
        return str(error), ""


def unplanted(results: Sequence[Result], tree: Tree) -> list[Result]:
    """Return the results, of which a kill counts only where its test passes without the bug."""
    tests = sorted({result.by for result in results if result.verdict == KILLED})
    passed: set[str] = set()
    if tests:
        files = sorted({test.partition("::")[0] for test in tests})
        outcome = tree.outcome(files, only=tests)
        passed = set(outcome.passed) - set(outcome.failed)
    return [
        Result(**{**asdict(r), "verdict": "its test fails without it, too"})
        if r.verdict == KILLED and r.by not in passed
        else r
        for r in results
    ]


class Runs:
    """Results of bugs, some of them from earlier runs, which a file keeps."""

    def __init__(self, file: Path | None, tests_from: Path) -> None:
        self._file, self._tests_from = file, tests_from
        self._sources = tree_hash(ROOT / "src", tests_from / "tests")
        self._known: dict[str, Result] = {}
        if file is not None and file.exists():
            records = json.loads(file.read_text(encoding="utf-8"))
            results = (Result(**record) for record in records)
            self._known = {result.key: result for result in results if result.verdict == KILLED}

    def key(self, mutant: Mutant) -> str:
        """Return what a result depends on: the bug, the package and the tests."""
        return f"{self._sources[:16]}-{mutant.digest()[:16]}"

    def keep(self, result: Result) -> None:
        """Add a result to those of the file."""
        self._known[result.key] = result
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps([asdict(r) for r in self._known.values()], indent=1), "utf-8")

    def all(self, mutants: Sequence[Mutant], jobs: int) -> list[Result]:
        """Return the result of each bug; those that are not known are found, ``jobs`` at a time."""
        missing = [mutant for mutant in mutants if self.key(mutant) not in self._known]
        with contextlib.ExitStack() as stack:
            trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
            for _ in range(jobs):
                trees.put(stack.enter_context(copied(self._tests_from)))
            pool = concurrent.futures.ThreadPoolExecutor(jobs)
            stack.callback(pool.shutdown, cancel_futures=True)
            for done in concurrent.futures.as_completed(
                pool.submit(self._run, mutant, trees) for mutant in missing
            ):
                self.keep(done.result())
                sys.stdout.write(done.result().line() + "\n")
                sys.stdout.flush()
            results = [self._known[self.key(mutant)] for mutant in mutants]
            return unplanted(results, trees.get())

    def _run(self, mutant: Mutant, trees: queue.SimpleQueue[Tree]) -> Result:
        tree, start = trees.get(), time.monotonic()
        try:
            verdict, by = tried(mutant, tree)
        finally:
            trees.put(tree)
        seconds = round(time.monotonic() - start, 1)
        return Result(
            name=mutant.name, room=mutant.room, verdict=verdict, by=by, seconds=seconds, key=self.key(mutant)
        )


def chosen(only: str, piece: str) -> list[Mutant]:
    """Return the bugs whose name holds a text or whose room begins with it; of these one piece of several."""
    found = [m for m in catalog() if only in m.name or m.room.startswith(only)]
    number, pieces = (int(text) for text in piece.split("/"))
    return found[number - 1 :: pieces]


def _interrupted(number: int, frame: object) -> None:
    end_all()
    sys.exit(128 + number)


def main() -> None:
    """Plant the bugs that are asked for, and print a table of what saw them."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a part of a name, or the beginning of a room")
    parser.add_argument("--piece", default="1/1", help="k/n: the k-th of n pieces")
    parser.add_argument(
        "--json", type=Path, help="a file of results: bugs that were killed are not planted again"
    )
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time")
    parser.add_argument("--tests-from", type=Path, default=ROOT, help="another checkout, for its tests")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupted)
    start = time.monotonic()
    runs = Runs(options.json, options.tests_from.resolve())
    results = runs.all(chosen(options.only, options.piece), options.jobs)
    minutes = (time.monotonic() - start) / 60
    killed = [result for result in results if result.verdict == KILLED]
    table = "\n".join(result.line() for result in results)
    sys.stdout.write(f"\n| Room | Bug | | Seen by | Seconds |\n|---|---|---|---|---|\n{table}\n\n")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = f"{minutes:.1f} minutes, {(used.ru_utime + used.ru_stime) / 60:.1f} of processor time"
    sys.stdout.write(f"{len(killed)} of {len(results)} bugs killed, in {taken}\n")
    sys.exit(len(killed) != len(results))


if __name__ == "__main__":
    main()
