"""Linear layers by the package humming-kernels, whose CUDA kernels are compiled for each layer's shape."""

from .backend import BACKEND

__all__ = ["BACKEND"]
