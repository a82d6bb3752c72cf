"""Numba kernels for the host: one pass over memory, the same bytes as the reference, on every CPU that LLVM knows."""

from .backend import BACKEND

__all__ = ["BACKEND"]
