"""Whole models: layers with quantizers that train, layers with packed weights, and how models get them."""

from .attention import SplitAttention
from .calibrate import Calibration, calibrate
from .conversion import Conversion, Converted
from .convert import convert, quantize_model
from .dynamic_quantize import DynamicQuantize
from .embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from .layer import PreparedLayer, QuantizedLayer
from .learners import LEARNERS, Learner
from .linear import QuantizedLinear
from .packed_weight import PackedWeight
from .prepare import prepare

__all__ = [
    "LEARNERS",
    "Calibration",
    "Conversion",
    "Converted",
    "DynamicQuantize",
    "Learner",
    "PackedWeight",
    "PreparedLayer",
    "QuantizedEmbedding",
    "QuantizedEmbeddingBag",
    "QuantizedLayer",
    "QuantizedLinear",
    "SplitAttention",
    "calibrate",
    "convert",
    "prepare",
    "quantize_model",
]
