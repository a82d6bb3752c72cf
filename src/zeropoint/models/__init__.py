"""Whole models: modules that hold packed weights, and the conversion of a model by a recipe."""

from .convert import Conversion, Converted, quantize_model
from .modules import PackedWeight, QuantizedEmbedding, QuantizedLinear

__all__ = [
    "Conversion",
    "Converted",
    "PackedWeight",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "quantize_model",
]
