"""The slow suite in named pieces: the tests of each, its environment, and how its last run ended.

    python -m tests.slow_pieces                print the table
    python -m tests.slow_pieces run NAME ...   run pieces in their environments, and record how they ended

NAME is a piece, ``name/2`` the second shard of one, ``due`` what failed or has not run for 200 commits,
``all`` everything. ``slow_pieces.json`` is the table. A test file belongs to the piece with the longest path
that leads to it, so that a new file always has a piece. What takes more than half an hour is cut into shards,
each of every Nth test.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

from tests.our_files import files_below

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/slow_pieces.json"
FRESH = 200
"""Commits after which a piece should run again."""
MINUTES = 30
"""Longest run of a piece on two idle cores."""
MARKS = "slow or crossed or rotating"
"""A crossed test runs whole, also those of its cases that quick runs of this commit take."""
PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit statuses of pytest: after others not all tests have run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run ended. ``commit`` has a plus behind it where files differed; ``source`` names who counted."""

    date: str
    commit: str
    passed: int
    skipped: int
    failed: int
    minutes: float | None
    source: str = "command"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python, the command that makes it, and variables that its tests need."""

    make: str
    python: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def stamp(self) -> Path:
        """File that says what the environment was made from."""
        return (ROOT / self.python).parents[1] / ".made"

    def recipe(self) -> str:
        """Hash of what the environment is made from: command, script, requirements and versions."""
        scripts = [ROOT / word for word in self.make.split() if word.endswith(".sh")]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        files = [path.read_text(encoding="utf-8") for path in (*scripts, ROOT / "constraints.txt")]
        return hashlib.sha256(json.dumps([self.make, project, files]).encode()).hexdigest()

    def ensure(self) -> None:
        """Make the environment, unless it was made from the same."""
        if self.stamp().exists() and self.stamp().read_text() == self.recipe():
            return
        subprocess.run(self.make, shell=True, cwd=ROOT, check=True)
        self.stamp().write_text(self.recipe())


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tests that run together: paths, the environment's name, and the last run of each shard.

    marks: expression of ``pytest -m``, empty for all tests. options: more of pytest's.
    """

    tests: tuple[str, ...]
    environment: str
    runs: tuple[Run | None, ...] = (None,)
    marks: str = MARKS
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Environments and pieces by name."""

    environments: Mapping[str, Environment]
    pieces: Mapping[str, Piece]

    @staticmethod
    def read(path: Path = TABLE) -> Table:
        """Read the file of the table."""
        found = json.loads(path.read_text(encoding="utf-8"))
        environments = {name: Environment(**fields) for name, fields in found["environments"].items()}
        return Table(environments=environments, pieces={k: _piece(v) for k, v in found["pieces"].items()})

    def text(self) -> str:
        """Content of the file, with a line for each run, so that changes are short."""
        environments = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(_given(environment))}"
            for name, environment in self.environments.items()
        )
        pieces = ",\n".join(_text(name, piece) for name, piece in self.pieces.items())
        return f'{{\n  "environments": {{\n{environments}\n  }},\n  "pieces": {{\n{pieces}\n  }}\n}}\n'

    def recorded(self, name: str, number: int, run: Run) -> Table:
        """Table with the last run of a shard, counted from 0."""
        piece = self.pieces[name]
        runs = (*piece.runs[:number], run, *piece.runs[number + 1 :])
        return dataclasses.replace(self, pieces={**self.pieces, name: dataclasses.replace(piece, runs=runs)})

    def owner(self, file: str) -> str | None:
        """Name of the piece with the longest path that leads to a file."""
        parents = {file, *map(str, PurePosixPath(file).parents)}
        paths = (
            (path, name) for name, piece in self.pieces.items() for path in piece.tests if path in parents
        )
        return max(paths, key=lambda pair: len(pair[0]), default=("", None))[1]

    def files(self, name: str) -> list[str]:
        """Test files of a piece."""
        return [file for file in files_of_tests() if self.owner(file) == name]

    def shards(self) -> Iterator[tuple[str, int, Run | None]]:
        """Yield the piece, number from 0, and last run of each shard."""
        for name, piece in self.pieces.items():
            for number, run in enumerate(piece.runs):
                yield name, number, run

    def title(self, name: str, number: int) -> str:
        """Name of a shard, which is that of the piece where there is one."""
        return name if len(self.pieces[name].runs) == 1 else f"{name}/{number + 1}"


def _piece(fields: Mapping[str, object]) -> Piece:
    """Piece from its fields in the file."""
    runs = tuple(None if run is None else Run(**run) for run in fields["runs"])
    return Piece(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()} | {"runs": runs})


def _given(value: Environment | Piece | Run) -> dict[str, object]:
    """Fields of a record that differ from their defaults; a variable that is empty is left out, too."""
    fields = ((f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value))
    return {name: content for name, content, default in fields if content not in (default, {})}


def _text(name: str, piece: Piece) -> str:
    """Lines of a piece in the file."""
    runs = ",\n".join(f"      {json.dumps(run if run is None else _given(run))}" for run in piece.runs)
    head = {key: value for key, value in _given(piece).items() if key != "runs"}
    return f'    {json.dumps(name)}: {json.dumps(head)[:-1]}, "runs": [\n{runs}\n    ]}}'


def files_of_tests() -> list[str]:
    """Every test file below tests/."""
    found = files_below(ROOT / "tests")
    return [path.relative_to(ROOT).as_posix() for path in found if path.match("test_*.py")]


def git(*arguments: str) -> str | None:
    """Output of git, or None without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def due(table: Table, log: Sequence[str]) -> list[tuple[str, int]]:
    """Shards that failed, have never run or not within ``log``, lines of the hash and date of each commit.

    A commit that was rebased away is not in the log; the date of its run then decides.
    """
    hashes = [line.partition(" ")[0] for line in log]
    oldest = log[-1].partition(" ")[2] if len(log) >= FRESH else ""

    def is_fresh(run: Run) -> bool:
        commit = run.commit.rstrip("+")
        return run.date > oldest or any(known.startswith(commit) for known in hashes)

    return [
        (name, number)
        for name, number, run in table.shards()
        if run is None or run.failed or not is_fresh(run)
    ]


def due_now(table: Table) -> list[tuple[str, int]] | None:
    """Shards that should run, or None where git does not say."""
    log = git("log", f"-{FRESH}", "--format=%H %cs")
    return None if not log else due(table, log.splitlines())


def titles(table: Table, shards: Iterable[tuple[str, int]]) -> list[str]:
    """Names of shards; a piece of which all are listed is named once."""
    chosen = list(shards)
    whole = {n for n, piece in table.pieces.items() if {(n, i) for i in range(len(piece.runs))} <= {*chosen}}
    return list(dict.fromkeys(n if n in whole else table.title(n, number) for n, number in chosen))


def chosen(table: Table, names: Iterable[str]) -> list[tuple[str, int]]:
    """Shards that names on the command line mean."""
    everything = [(name, number) for name, number, _ in table.shards()]
    found: list[tuple[str, int]] = []
    for asked in names:
        if asked == "due":
            found += due_now(table) or []
            continue
        means = [(n, i) for n, i in everything if asked in ("all", n, table.title(n, i))]
        if not means:
            raise SystemExit(f"there is no piece {asked!r}; `make test-slow` lists them")
        found += means
    return list(dict.fromkeys(found))


def counts(report: str) -> dict[str, int]:
    """Tests that passed, were skipped and failed, by a report in the form of JUnit."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    number = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped")}
    failed = sum(int(suite.get(key, 0)) for suite in suites for key in ("failures", "errors"))
    passed = number["tests"] - number["skipped"] - failed
    return {"passed": passed, "skipped": number["skipped"], "failed": failed}


def commit() -> str:
    """Hash of the commit that is checked out, with a plus where files differ from it."""
    found = git("rev-parse", "--short", "HEAD")
    if found is None:
        return "no repository"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{TABLE.relative_to(ROOT)}")
    return f"{found}+" if changed else found


def command(table: Table, name: str, number: int, report: Path, jobs: int) -> list[str]:
    """Command that runs a shard in so many processes."""
    piece = table.pieces[name]
    python = str(ROOT / table.environments[piece.environment].python)
    shard = [f"--shard={number + 1}/{len(piece.runs)}"] if len(piece.runs) > 1 else []
    processes = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    # The counts of the fault suites are properties of their tests, which the newer family of reports refuses.
    reported = ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    options = ["-q", "-m", piece.marks, *processes, *shard, *reported, *piece.options]
    return [python, "-m", "pytest", *options, *table.files(name)]


def run(name: str, number: int, jobs: int) -> int:
    """Run a shard in so many processes, record how it ended, and return the exit status of pytest."""
    table = Table.read()
    environment = table.environments[table.pieces[name].environment]
    environment.ensure()
    title, before = table.title(name, number), commit()
    print(f"{title}:", flush=True)
    own = {"PYTHONPATH": str(ROOT / "src"), **environment.variables}
    variables = {"NUMBA_CACHE_DIR": str(ROOT / ".numba_cache"), **os.environ, **own}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        start = time.monotonic()
        status = subprocess.run(
            command(table, name, number, report, jobs), cwd=ROOT, env=variables, check=False
        ).returncode
        minutes = round((time.monotonic() - start) / 60, 1)
        if status not in (PASSED, FAILED):
            why = "there are no such tests" if status == NO_TESTS else f"pytest ended with status {status}"
            print(f"{title}: not recorded, since {why}")
            return 0 if status == NO_TESTS else status
        found = counts(report.read_text(encoding="utf-8"))
    last = Run(date=datetime.date.today().isoformat(), commit=before, **found, minutes=minutes)
    TABLE.write_text(Table.read().recorded(name, number, last).text(), encoding="utf-8")
    print(f"{title}: {result(last)} in {minutes} minutes, recorded in {TABLE.relative_to(ROOT)}")
    return 1 if last.failed else 0


def result(run: Run) -> str:
    """Counts of a run in words."""
    named = ((run.passed, "passed"), (run.skipped, "skipped"), (run.failed, "failed"))
    return ", ".join(f"{count} {what}" for count, what in named if count)


def minutes(run: Run) -> str:
    """Duration in a cell; one past the limit says so."""
    if run.minutes is None:
        return "not recorded"
    return f"{run.minutes:.1f}{' (cut it)' if run.minutes > MINUTES else ''}"


def page(table: Table) -> str:
    """Table in Markdown, one row a shard."""
    late = set(due_now(table) or ())
    lines = [
        "| Piece | Tests | Environment | Date | Commit | Result | Minutes | Due |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, number, run in table.shards():
        piece = table.pieces[name]
        last = (
            ("not recorded", "", "", "") if run is None else (run.date, run.commit, result(run), minutes(run))
        )
        cells = (table.title(name, number), " ".join(piece.tests), piece.environment, *last)
        lines.append(f"| {' | '.join(cells)} | {'due' if (name, number) in late else ''} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or run pieces."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.slow_pieces", description=(__doc__ or "").split("\n")[0]
    )
    verbs = parser.add_subparsers(dest="verb")
    verb = verbs.add_parser("run", help="run pieces")
    verb.add_argument("names", nargs="+", metavar="NAME")
    verb.add_argument("--jobs", type=int, default=2, help="processes of pytest")
    given = parser.parse_args(arguments)
    table = Table.read()
    if given.verb is None:
        print(f"{page(table)}\n\nmake test-slow PIECE=name runs one, PIECE=due all that are due.")
        return 0
    return max((run(*shard, given.jobs) for shard in chosen(table, given.names)), default=0)


if __name__ == "__main__":
    sys.exit(main())
