"""Triton kernels for CUDA, the reference's bytes; importable without Triton."""

from .backend import BACKEND
from .dense_launches import DENSE
from .statistics_launch import COUNTER

__all__ = ["BACKEND", "COUNTER", "DENSE"]
