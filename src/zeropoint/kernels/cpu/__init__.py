"""Numba kernels for every CPU that LLVM knows: one pass over memory, the same bytes as the reference."""

from .host.backend import BACKEND
from .host.counter import COUNTER
from .host.dense import DENSE
from .machine import compiling as compiling

__all__ = ["BACKEND", "COUNTER", "DENSE"]
