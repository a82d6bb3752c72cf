"""Result memory, kept for the next result when large.

New memory costs a page fault for every page and the zeros that the system writes there; for results of many
megabytes that takes longer than the kernels do. So what a released result leaves is kept, up to KEPT bytes in
the whole process. The system is allowed to take these pages back whenever it is short of memory; until
then they count as memory of the process. Workers of a checkpoint keep none: their memory is counted.
"""

from __future__ import annotations

import math
import mmap
import weakref
from typing import Any

import numpy as np
import torch

from ....ops.threads import is_limited

LARGE = 1 << 22
"""Bytes from which memory is kept; smaller blocks the C library keeps itself."""
KEPT = 1 << 26
"""Most bytes that are kept: two results of 4096 x 4096 bfloat16."""
_WHOLE = 1 << 21
"""Bytes of a huge page."""
_AVAILABLE = all(hasattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_FREE"))
_kept: list[mmap.mmap] = []
"""Released last comes last. A finalizer may run at any line, also of this file: only calls that the
interpreter does not divide touch the list, and there is no lock that a finalizer could wait for."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized host memory, aligned to a cache line or better."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not _AVAILABLE or is_limited():
        return torch.empty(shape, dtype=dtype, device="cpu")
    mapped = _mapped(-(-size // _WHOLE) * _WHOLE)
    array: Any = np.frombuffer(mapped, np.uint8, size)
    # The storage of the tensor holds this array, and nothing else does.
    weakref.finalize(array, _release, mapped).atexit = False
    return torch.from_numpy(array).view(dtype).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    """Return kept memory of ``size`` bytes, or new memory."""
    for mapped in reversed(_kept.copy()):
        if len(mapped) == size and _took(mapped):
            return mapped
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _took(mapped: mmap.mmap) -> bool:
    """Remove memory from the kept; False if another thread was faster."""
    try:
        _kept.remove(mapped)
    except ValueError:
        return False
    return True


def _release(mapped: mmap.mmap) -> None:
    """Keep unreferenced memory; free the oldest where it is too much."""
    if len(mapped) > KEPT:
        return
    mapped.madvise(mmap.MADV_FREE)
    _kept.append(mapped)
    kept = _kept.copy()
    while sum(map(len, kept)) > KEPT:
        _took(kept.pop(0))
