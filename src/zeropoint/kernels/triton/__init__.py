"""Triton kernels for CUDA devices: the same bytes as the reference. Importable without Triton."""

from .backend import BACKEND
from .dense_launches import DENSE
from .statistics_launch import COUNTER

__all__ = ["BACKEND", "COUNTER", "DENSE"]
