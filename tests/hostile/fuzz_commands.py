"""Fuzz the command line: files of strangers changed at random, through the commands that read them.

    python -m tests.hostile.fuzz_commands [--files 3000] [--seed 0] [--only NAME] [--keep FOLDER]

Each command runs in this process, as ``zeropoint`` does, on a file that is new each time. A failure is an
exception that nothing foresaw, a message that is no single line, more than CPU_SECONDS of processor time, or
more than MORE_BYTES of memory. The files of failures are kept, the first of each kind, and a table counts
the results, of the files so far after Ctrl-C. The exit status is 1 where anything failed.
"""

import argparse
import contextlib
import io
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.hostile.command_subjects import OUT, Subject, Subjects

from zeropoint.cli.main import UNEXPECTED, main

CPU_SECONDS, MORE_BYTES = 10.0, 1 << 30
ROUND = 20
DONE, REFUSED = "done", "refused"


class HangError(BaseException):
    """Raised where one command takes too long; no Exception, so that nothing on the way catches it."""


@dataclass(slots=True)
class Tally:
    """The results of the files of a subject. failures: by kind. seconds, nbytes: most of one file."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    nbytes: int = 0

    def line(self, name: str) -> str:
        """Return a row of the table."""
        failed = sum(self.failures.values())
        return (
            f"| {name} | {self.counts.total()} | {self.counts[DONE]} | {self.counts[REFUSED]} | {failed} "
            f"| {self.seconds:.1f} | {self.nbytes >> 20} |"
        )


HEAD = "| File | changed | done | refused | failed | most s | most MiB |\n|---|---:|---:|---:|---:|---:|---:|"


def fuzz(subject: Subject, rng: random.Random, files: int, keep: Path, tally: Tally | None = None) -> Tally:
    """Give changed files to the commands of a subject; return the results, raise what goes past ``main``."""
    tally = Tally() if tally is None else tally
    path = subject.folder / subject.file
    original = path.read_bytes()
    try:
        for _ in range(files):
            content = subject.mutate(original, rng, [original])
            path.write_bytes(content)
            command = rng.choice(list(subject.commands))
            try:
                outcome = _outcome(command, tally)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                _keep(subject, content, command, repr(error), keep)
                raise
            tally.counts[outcome if outcome in (DONE, REFUSED) else "failed"] += 1
            if outcome not in (DONE, REFUSED):
                if not tally.failures[outcome]:
                    _keep(subject, content, command, outcome, keep)
                tally.failures[outcome] += 1
    finally:
        path.write_bytes(original)
    return tally


def _keep(subject: Subject, content: bytes, command: object, outcome: str, keep: Path) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    name = f"{subject.name}-{len(list(keep.iterdir()))}".replace(" ", "_").replace("/", "_")
    (keep / name).write_bytes(content)
    sys.stderr.write(f"{subject.name}: {outcome}\n  {command}\n  kept as {keep / name}\n")


def _outcome(command: object, tally: Tally) -> str:
    """Return DONE, REFUSED, or what failed."""
    assert isinstance(command, tuple)
    place = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    words = [str(place / "out") if word is OUT else str(word) for word in command]
    before, start = _reset_peak(), time.process_time()
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGVTALRM, _hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * CPU_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status: int | None = main(words)
    except HangError:
        return "it does not end"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        shutil.rmtree(place, ignore_errors=True)
        seconds, nbytes = time.process_time() - start, _peak() - before
        tally.seconds, tally.nbytes = max(tally.seconds, seconds), max(tally.nbytes, nbytes)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if seconds > CPU_SECONDS or nbytes > MORE_BYTES:
        return f"it took {seconds:.0f} s and {nbytes >> 20} MiB" if status == 0 else "a refusal took too much"
    said = [line for line in err.getvalue().splitlines() if not line.startswith("note: ")]
    errors = [line for line in said if line.startswith("error: ")]
    bad = any(word in err.getvalue() for word in ("Traceback", "out of memory", UNEXPECTED))
    if bad or (status and len(errors) != 1):
        return f"status {status}: {err.getvalue()[-300:]!r}"
    return DONE if status == 0 else REFUSED


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError


def _reset_peak() -> int:
    """Let the peak of memory begin anew, and return what the process has."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) << 10


def say(line: str) -> None:
    """Write a line of the table."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(files: int, seed: int, only: str | None, keep: Path) -> dict[str, Tally]:
    """Fuzz all subjects in turns of ROUND files each, to the end or Ctrl-C, and return the results."""
    with tempfile.TemporaryDirectory(prefix="zeropoint-fuzz-", dir="/dev/shm") as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = {each.name: each for each in Subjects(Path(folder)).found if only in (None, each.name)}
        tallies = {name: Tally() for name in found}
        rng, each = random.Random(seed), max(1, files // max(1, len(found)))
        with contextlib.suppress(KeyboardInterrupt):
            for start in range(0, each, ROUND):
                for name, subject in found.items():
                    fuzz(subject, rng, min(ROUND, each - start), keep, tallies[name])
    return tallies


def _limit() -> None:
    """Let this process fail, and not the machine, where a file takes all memory."""
    most = _status("VmSize") + 4 * MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "zeropoint-fuzz-failures")
    given = parser.parse_args()
    _limit()
    tallies = run(given.files, given.seed, given.only, given.keep)
    say(HEAD)
    for name, each in tallies.items():
        say(each.line(name))
    whole = Tally()
    for tally in tallies.values():
        whole.counts += tally.counts
        whole.failures += tally.failures
        whole.seconds, whole.nbytes = max(whole.seconds, tally.seconds), max(whole.nbytes, tally.nbytes)
    say(whole.line("all"))
    for failure, count in whole.failures.most_common():
        say(f"{count} x {failure}")
    return int(bool(whole.failures))


if __name__ == "__main__":
    sys.exit(_main())
