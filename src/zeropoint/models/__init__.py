"""Whole models: modules that hold packed weights, and the conversion of a model by a recipe."""

from .calibrate import Calibration, calibrate
from .convert import Conversion, Converted, quantize_model
from .embedding import QuantizedEmbedding
from .linear import QuantizedLinear
from .packed_weight import PackedWeight

__all__ = [
    "Calibration",
    "Conversion",
    "Converted",
    "PackedWeight",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "calibrate",
    "quantize_model",
]
