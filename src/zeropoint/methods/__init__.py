"""Quantization algorithms: one module per method, found by its name.

A method sees the weight of one layer, its scheme, and statistics of the data that reach the layer. It knows
no model, file or recipe.
"""

from ..method_names import LOSSLESS, LOSSLESS_OR_NEAREST, OF_CODES, OF_TABLES, ROTATING
from .method import Bound, LayerData, LayerResult, Loss, Method, Report, Samples, Scope
from .registry import NEAREST, method_named, methods, steps

__all__ = [
    "LOSSLESS", "LOSSLESS_OR_NEAREST", "NEAREST", "OF_CODES", "OF_TABLES", "ROTATING", "Bound", "LayerData",
    "LayerResult", "Loss", "Method", "Report", "Samples", "Scope", "method_named", "methods",
    "steps",
]  # fmt: skip
