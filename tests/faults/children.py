"""Children of the server: start a command line, let it go, wait for its end."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.calls import Fault

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended. status: its exit status, or None. signal: what killed it, or None. peak: bytes."""

    status: int | None
    signal: int | None
    out: str
    err: str
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command line, and the circumstances in which a child carries it out.

    root: files below are seen by the layer of calls. plant: a bug. limits: of `resource`, by name.
    record: where the child writes which calls it made. closed: run without a stdout. pace: seed of random
    pauses in front of calls.
    """

    arguments: tuple[str, ...]
    root: Path
    fault: Fault | None = None
    plant: str | None = None
    limits: tuple[tuple[str, int], ...] = ()
    umask: int = 0o022
    environment: tuple[tuple[str, str], ...] = ()
    record: Path | None = None
    closed: bool = False
    pace: int | None = None


class Children:
    """The server, and what was started in it. folder: where the output of children goes."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._logs: dict[int, tuple[Path, Path]] = {}
        self._started = 0

    def load(self, module: str) -> None:
        """Import a module in the server, so that no child takes the time."""
        self._ask(do="load", module=module)

    def start(self, job: Job) -> int:
        """Return the process id of a child that waits to be let go."""
        self._started += 1
        logs = (self._folder / f"{self._started}.out", self._folder / f"{self._started}.err")
        request = {
            "arguments": job.arguments, "root": str(job.root), "plant": job.plant, "umask": job.umask,
            "fault": None if job.fault is None else asdict(job.fault), "limits": dict(job.limits),
            "environment": dict(job.environment), "out": None if job.closed else str(logs[0]),
            "pace": job.pace, "err": str(logs[1]), "record": None if job.record is None else str(job.record),
        }  # fmt: skip
        pid = int(self._ask(do="start", job=request)["pid"])
        self._logs[pid] = logs
        return pid

    def go(self, pid: int) -> None:
        """Let a child run."""
        self._ask(do="go", pid=pid)

    def wait_for_stop(self, pid: int) -> None:
        """Wait until a child is stopped by a signal."""
        assert os.WIFSTOPPED(self._ask(do="stopped", pid=pid)["status"])

    def is_running(self, pid: int) -> bool:
        """Return whether a child that was let go has not ended."""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def wait(self, pid: int) -> Ended:
        """Wait for the end of a child."""
        reply = self._ask(do="wait", pid=pid)
        status = reply["status"]
        texts = [log.read_text() if log.exists() else "" for log in self._logs.pop(pid)]
        return Ended(
            status=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            out=texts[0], err=texts[1], peak=reply["peak"],
        )  # fmt: skip

    def run(self, job: Job) -> Ended:
        """Carry out a job to its end."""
        pid = self.start(job)
        self.go(pid)
        return self.wait(pid)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        reply = self._server.stdout.readline()
        assert reply, "the server of children has ended"
        answer: dict[str, Any] = json.loads(reply)
        return answer


@contextmanager
def children(folder: Path) -> Iterator[Children]:
    """Start a server for the block; `folder` takes what children print."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.server"], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "{}\n", "the server of children did not start"
        yield Children(server, folder)
        assert server.stdin is not None
        server.stdin.close()
