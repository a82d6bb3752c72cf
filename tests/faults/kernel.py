"""What the kernel saw of a child, and faults that the kernel itself puts in the way: strace.

It is the independent witness: it knows nothing of Python or of the layer of calls.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.faults.children import Children, Ended, Job

# System calls that change files or make changes durable, by the names of the layer's functions.
SYSTEM_CALLS = {
    "open": "open,openat,openat2,creat", "pwrite": "pwrite64,pwritev,pwritev2", "write": "write,writev",
    "copy_file_range": "copy_file_range,sendfile", "ftruncate": "ftruncate", "truncate": "truncate",
    "posix_fallocate": "fallocate", "fsync": "fsync", "fdatasync": "fdatasync,sync_file_range,sync,syncfs",
    "rename": "rename,renameat,renameat2", "unlink": "unlink,unlinkat", "mkdir": "mkdir,mkdirat",
    "rmdir": "rmdir", "link": "link,linkat,symlink,symlinkat", "chmod": "chmod,fchmodat",
    "fchmod": "fchmod,fchown", "flock": "flock",
}  # fmt: skip
LAYER_NAME = {call: name for name, calls in SYSTEM_CALLS.items() for call in calls.split(",")}
_LINE = re.compile(r"^(?P<thread>\d+) +(?P<call>\w+)\((?P<rest>.*)$")
_CHANGES = re.compile(r"O_CREAT|O_WRONLY|O_RDWR")
_PATHS = re.compile(r'"((?:[^"\\]|\\.)*)"|\d+<([^>]*)>')


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A system call that the kernel saw and carried out: `nth` of its name in its thread.

    changes: whether it is no mere open for reading, or to list a directory.
    """

    call: str
    path: str
    thread: int
    nth: int
    changes: bool

    @property
    def name(self) -> str:
        """The function of the layer that represents it."""
        return LAYER_NAME[self.call]


@cache
def why_not() -> str | None:
    """Return why strace cannot be used here, or None."""
    found = shutil.which("strace")
    if found is None:
        return "strace is not installed"
    tried = subprocess.run([found, "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.strip()[:200]}"


@contextmanager
def _held(pid: int, options: Sequence[str]) -> Iterator[None]:
    """Trace a waiting child for the block, which lets it go and waits for its end."""
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), *options],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    with tracer:
        assert tracer.stderr is not None
        attached = tracer.stderr.readline()
        assert "attached" in attached, attached
        yield
        tracer.stderr.read()


def traced(children: Children, job: Job, log: Path) -> tuple[Ended, list[Seen]]:
    """Carry out a job and return what the kernel saw of the files below its root, in order."""
    calls = ",".join(SYSTEM_CALLS.values())
    pid = children.start(job)
    with _held(pid, ["-y", "-s", "0", "-o", str(log), "-e", f"trace={calls}"]):
        children.go(pid)
        ended = children.wait(pid)
    return ended, list(_seen(log, str(job.root)))


def _seen(log: Path, root: str) -> Iterator[Seen]:
    counts: dict[tuple[str, str], int] = {}
    for line in log.read_text().splitlines():
        found = _LINE.match(line)
        if found is None or found["call"] not in LAYER_NAME:
            continue
        counts[found["thread"], found["call"]] = nth = counts.get((found["thread"], found["call"]), 0) + 1
        # Of copy_file_range, the second descriptor is written.
        paths = _paths(found["rest"])
        path = next((p for p in reversed(paths[:2]) if p.startswith(root)), None)
        if path is not None and " = -1 E" not in found["rest"]:
            yield Seen(
                call=found["call"], path=path[len(root) + 1 :] or ".", thread=int(found["thread"]), nth=nth,
                changes=LAYER_NAME[found["call"]] != "open" or _CHANGES.search(found["rest"]) is not None,
            )  # fmt: skip


def _paths(rest: str) -> list[str]:
    """Return the paths of a call; a name that stands behind the descriptor of a folder is one below it."""
    paths: list[str] = []
    before = ""
    for name, opened in _PATHS.findall(rest):
        if before and name and not name.startswith("/"):
            paths[-1] = f"{before}/{name}"
        else:
            paths.append(name or opened)
        before = opened
    return paths


def injected(children: Children, job: Job, seen: Seen, what: str, *, log: Path) -> Ended:
    """Carry out a job in which the kernel does ``what`` ("signal=SIGKILL", "error=EIO") at one call."""
    pid = children.start(job)
    options = ["-o", str(log), "-e", f"trace={seen.call}", "-e", f"inject={seen.call}:{what}:when={seen.nth}"]
    with _held(pid, options):
        children.go(pid)
        return children.wait(pid)
