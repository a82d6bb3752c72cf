"""Triton kernels for CUDA devices: the same bytes as the reference. Importable without Triton."""

from .backend import BACKEND

__all__ = ["BACKEND"]
