"""Python processes that start in milliseconds: forked from one that has imported torch and zeropoint.

Neither has used a thread or compiled a kernel there, so that a child may still choose. A test of how Python
starts, of what an import loads or of memory starts a Python of its own.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "numpy", "zeropoint", "zeropoint.functional"])


def _carry_out(code: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str) -> None:
    """Run code in the child as ``python -c`` would."""
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with variables of the environment besides those that are set."""
    with tempfile.TemporaryDirectory() as folder:
        child = _FORKS.Process(
            target=_carry_out, args=(code, arguments, {**os.environ, **environment}, folder)
        )
        child.start()
        child.join()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    assert child.exitcode is not None
    return subprocess.CompletedProcess([*arguments], child.exitcode, out, err)


def run_two(work: Callable[..., Any], *arguments: Any) -> None:
    """Call ``work(rank, *arguments)`` in two processes and wait for both; an error in one is raised here."""
    torch.multiprocessing.start_processes(work, arguments, nprocs=2, start_method="forkserver")
