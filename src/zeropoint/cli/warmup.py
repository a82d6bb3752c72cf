"""The command ``zeropoint warmup``."""

from __future__ import annotations

import time

from ..progress import bar
from . import lazy


def warmup() -> None:
    """Compile the kernels for this machine ahead of time.

    It takes some minutes, once. Otherwise they are compiled when they are first used, some seconds at a time.
    They are kept for all later processes below ~/.cache/zeropoint, or below NUMBA_CACHE_DIR where that is
    set.

    \b
    Examples:
      zeropoint warmup
    """  # noqa: D301 (click's mark for a paragraph that keeps its lines)
    start = time.perf_counter()
    with bar("compiling", str) as on_progress:
        lazy.compile_kernels(on_progress)
    print(f"every kernel is ready, in {time.perf_counter() - start:.1f} s")
