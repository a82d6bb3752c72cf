"""Whole models: trainable quantized layers, packed layers, and their conversion."""

from typing import TYPE_CHECKING, Any

from ..names_elsewhere import elsewhere
from .attention import SplitAttention
from .block_chain import Steps
from .calibrate import Calibration, calibrate
from .conversion import Conversion, Converted
from .convert import convert, quantize_model
from .dequantize import dequantize_model
from .dynamic_quantize import DynamicQuantize, LocalQuantize
from .embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from .experts import SplitExperts
from .fold import Folding, fold
from .functional_modules import Add, Concatenate, Multiply
from .layer import PreparedLayer, QuantizedLayer
from .linear import QuantizedLinear
from .packed_weight import PackedWeight
from .prepare import prepare
from .qat_config import QAT_CONFIGS, QATConfig, parameter_groups
from .sequential import calibrate_sequential
from .stacked_weights import SplitStacks

__all__ = [
    "QAT_CONFIGS",
    "Add",
    "Calibration",
    "Concatenate",
    "Conversion",
    "Converted",
    "DynamicQuantize",
    "Folding",
    "QATConfig",
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
    "SplitStacks",
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

if not TYPE_CHECKING:  # type checkers would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """Raise AttributeError, which says where a name of another library is."""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{elsewhere(name)}")
