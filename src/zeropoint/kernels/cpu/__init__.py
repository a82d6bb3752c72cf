"""Numba kernels for every CPU that LLVM knows: one pass over memory, the same bytes as the reference."""

from .backend import BACKEND

__all__ = ["BACKEND"]
