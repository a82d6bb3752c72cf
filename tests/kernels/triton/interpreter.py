"""Triton's own functions, loaded for its interpreter before any other package loads them for a GPU.

Triton decides once, where a function is loaded, whether it is interpreted, and transformers loads Triton.
The outermost conftest.py imports this first.
"""

import importlib
import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Device of the tensors that the kernels get: that of the interpreter where there is no GPU."""

if DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    del os.environ["TRITON_INTERPRET"]
