"""Triton kernels for CUDA devices: the same bytes as the reference. Importable without Triton."""

from .backend import BACKEND
from .counter import COUNTER
from .dense_launches import DENSE

__all__ = ["BACKEND", "COUNTER", "DENSE"]
