"""Decide on the corpus in a folder with little memory and processor time, and print the errors as JSON.

    python -m tests.hostile.limited FOLDER

The operating system sets the limits: a case that allocates or computes more than they allow ends the process
or raises MemoryError, and the test that starts this script fails.
"""

import json
import resource
import sys
from pathlib import Path

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import ZeropointError

MORE_BYTES = 640 << 20
"""A header of the largest size is read (100 MB), copied once, and decoded: three times that, and a margin."""
MORE_SECONDS = 240
"""Of processor time, for the whole corpus, which takes about a tenth."""


def limit(more_seconds: float = MORE_SECONDS) -> None:
    """Let this process grow by so much, and compute for so long, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + more_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def decide(path: Path) -> list[str | None]:
    """Return the error of each command on a path, or None."""
    errors: list[str | None] = []
    for command in (
        lambda: make_plan(open_source(path), "int8:channel"),
        lambda: inspect_checkpoint(path),
        lambda: verify(path, limits=Limits(workers=1)).require(),
    ):
        try:
            command()
            errors.append(None)
        except ZeropointError as error:
            errors.append(str(error))
    return errors


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    expected = json.loads((folder / "expected.json").read_text())
    limit()
    sys.stdout.write(json.dumps([decide(folder / case["path"]) for case in expected]))
