"""Whole models: layers with quantizers that train, layers with packed weights, and how models get them."""

from .attention import SplitAttention
from .calibrate import Calibration, calibrate
from .conversion import Conversion, Converted
from .convert import convert, quantize_model
from .dynamic_quantize import DynamicQuantize, LocalQuantize
from .embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from .experts import SplitExperts
from .fold import Folding, fold
from .groups import parameter_groups
from .joins import Add, Concatenate, Multiply
from .layer import PreparedLayer, QuantizedLayer
from .learners import LEARNERS, Learner
from .linear import QuantizedLinear
from .original import dequantize_model
from .packed_weight import PackedWeight
from .prepare import prepare
from .sequential import Steps, calibrate_sequential

__all__ = [
    "LEARNERS",
    "Add",
    "Calibration",
    "Concatenate",
    "Conversion",
    "Converted",
    "DynamicQuantize",
    "Folding",
    "Learner",
    "LocalQuantize",
    "Multiply",
    "PackedWeight",
    "PreparedLayer",
    "QuantizedEmbedding",
    "QuantizedEmbeddingBag",
    "QuantizedLayer",
    "QuantizedLinear",
    "SplitAttention",
    "SplitExperts",
    "Steps",
    "calibrate",
    "calibrate_sequential",
    "convert",
    "dequantize_model",
    "fold",
    "parameter_groups",
    "prepare",
    "quantize_model",
]
