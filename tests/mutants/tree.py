"""A temporary copy of the tree, in which one bug at a time is planted and tested."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutant import PACKAGE, ROOT, Mutant

COPIED = ("tests", "vectors", "docs", "examples", "benchmarks", "src")
"""The folders that tests read; files of the top folder come along."""
LEFT_BY_TESTS = (".hypothesis", ".numba_cache")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")
SECONDS = 900.0
"""The longest that the tests of one bug may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Tests that passed and failed, files that could not be collected, the package in use, the output."""

    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    package: tuple[str, ...] = ()
    output: str = ""


def tree_hash(*folders: Path) -> str:
    """Return a hash of the files in folders, without those of this one and those that tools leave behind."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc" and "mutants" not in path.relative_to(folder).parts:
                digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Tree:
    """A copy of the tree in ``root``."""

    root: Path

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant a bug for the length of a ``with``; raise DoesNotApplyError where its text is not there."""
        path = self.root / PACKAGE / mutant.file
        before = path.read_text(encoding="utf-8")
        after = mutant.applied(before)
        try:
            self._write(path, after)
            yield
        finally:
            self._write(path, before)
            for name in LEFT_BY_TESTS:
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _write(self, path: Path, source: str) -> None:
        # Python takes compiled code for current where time, in seconds, and size are those of the source.
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        path.write_text(source, encoding="utf-8")

    def outcome(
        self, tests: Sequence[str], *, only: Sequence[str] = (), own_kernels: bool = False
    ) -> Outcome:
        """Run tests of the copy up to the first that fails; raise TimeoutError after 15 minutes.

        Args:
            tests: folders, files or tests.
            only: names of tests, where others must not run; then a failure does not end the run.
            own_kernels: whether compiled kernels are kept for this run alone.
        """
        report, chosen = self.root / "report.json", self.root / "only.json"
        report.unlink(missing_ok=True)
        variables = {
            **os.environ,
            # Before what is installed, here and in processes that tests start.
            "PYTHONPATH": str(self.root / "src"),
            "MUTANTS_REPORT": str(report),
        }
        # Without bytecode each run would compile all of the sources and tests again.
        for name in ("MUTANTS_ONLY", "PYTHONDONTWRITEBYTECODE"):
            variables.pop(name, None)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.mutants.watch",
            "-p",
            "no:cacheprovider",
            "--every-turn",
        ]
        if only:
            chosen.write_text(json.dumps(list(only)), encoding="utf-8")
            variables["MUTANTS_ONLY"] = str(chosen)
        else:
            command.append("-x")
        if own_kernels:
            variables["NUMBA_CACHE_DIR"] = str(self.root / ".numba_cache")
        output = _finished([*command, *tests], self.root, variables)
        if not report.exists():
            return Outcome(output=output)
        found = {name: tuple(values) for name, values in json.loads(report.read_text("utf-8")).items()}
        return Outcome(**found, output=output)


_RUNNING: set[int] = set()
"""Processes of pytest, each the first of a group."""
_ENDED = threading.Event()


def end_all() -> None:
    """End the tests that run, with their children, and let no others begin."""
    _ENDED.set()
    for number in tuple(_RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)


def _finished(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Return the output of a command, which is ended with its children after :data:`SECONDS`."""
    if _ENDED.is_set():
        raise InterruptedError
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        _RUNNING.add(process.pid)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no answer within {SECONDS:.0f} s") from None
        finally:
            # Children that outlive the tests of a bug would disturb those of the next.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _RUNNING.discard(process.pid)
            process.wait()
        file.seek(0)
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def copied(tests_from: Path = ROOT) -> Iterator[Tree]:
    """Copy the tree to a temporary folder: the package from here, all else from ``tests_from``."""
    with tempfile.TemporaryDirectory(prefix="zeropoint-mutants-") as name:
        root = Path(name).resolve()
        for path in tests_from.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy2(path, root)
        for folder in COPIED:
            origin = ROOT if folder == "src" else tests_from
            shutil.copytree(origin / folder, root / folder, ignore=_LEFT_OUT)
        shutil.copytree(Path(__file__).parent, root / "tests/mutants", ignore=_LEFT_OUT, dirs_exist_ok=True)
        yield Tree(root)
