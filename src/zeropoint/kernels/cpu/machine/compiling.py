"""The notice that kernels are compiled: one line in a process.

Compiling takes seconds for each kernel, at its first call on a machine, and looks like a program that hangs.
Numba says when a function is not in its cache; kernels that are found there are loaded in silence.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from numba.core import event

from .cache import cache_directory

QUIET = "ZEROPOINT_QUIET"
"""The variable of the environment that keeps the line back, where it is set to anything."""
_OURS = __name__.rpartition(".machine.")[0]
_ONCE = (
    "zeropoint: compiling kernels for this machine, once; this takes up to a minute "
    "(`zeropoint warmup` does it ahead of time)\n"
)
_EACH_RUN = (
    "zeropoint: compiling kernels, which takes up to a minute in each run, since no folder can be written "
    "that would keep them; set NUMBA_CACHE_DIR to one that you alone can write\n"
)


class _Compiling(event.Listener):
    """Says that kernels are compiled, once."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: Any) -> None:
        """Handle the begin of a compilation; other packages' are ignored."""
        if self.said or not event.data["dispatcher"].py_func.__module__.startswith(_OURS):
            return
        self.said = True
        if not os.environ.get(QUIET):
            sys.stderr.write(_ONCE if cache_directory() is not None else _EACH_RUN)

    def on_end(self, event: Any) -> None:
        """Do nothing: the next kernel may be compiled at any time."""


_register: Any = event.register  # which has no types
_register("numba:compile", _Compiling())
