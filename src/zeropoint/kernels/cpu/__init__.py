"""Numba kernels for all LLVM CPUs: one pass, the reference's bytes."""

from typing import TYPE_CHECKING

from ...deferred_names import imported
from .host.backend import BACKEND

if TYPE_CHECKING:
    from .host.counter import COUNTER as COUNTER
    from .host.dense import DENSE as DENSE

__all__ = ["BACKEND", "COUNTER", "DENSE"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        return imported(__name__, name)
