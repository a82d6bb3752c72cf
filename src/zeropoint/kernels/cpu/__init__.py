"""Numba kernels for every CPU that LLVM knows: one pass over memory, the same bytes as the reference."""

from . import compiling as compiling
from .host.backend import BACKEND
from .host.counter import COUNTER

__all__ = ["BACKEND", "COUNTER"]
