"""Numba kernels for all LLVM CPUs: one pass, the reference's bytes."""

from .host.backend import BACKEND
from .host.counter import COUNTER
from .host.dense import DENSE
from .machine import compiling as compiling

__all__ = ["BACKEND", "COUNTER", "DENSE"]
