"""zeropoint: few-bit numbers in PyTorch, exact and at memory speed."""

from .errors import (
    CalibrationError,
    CheckpointError,
    DtypeError,
    FormatError,
    NonFiniteError,
    RangeError,
    RecipeError,
    SchemeError,
    ShapeError,
    UnsupportedError,
    ZeropointError,
)
from .formats import CodebookFormat, FloatFormat, IntFormat, Specials, format_name, get_format
from .functional import choose_params, dequantize, explain, fake_quantize, quantize
from .layout.packing import pack, unpack
from .models import calibrate, convert, fold, prepare, quantize_model
from .ops.library import only_backend
from .params import QuantizationParams
from .prepared import Plan, can_implement, plan
from .schemes import Granularity, Scheme
from .tensor import QuantizedTensor
from .training import FakeQuantize

__version__ = "0.1.0"

__all__ = [
    "CalibrationError",
    "CheckpointError",
    "CodebookFormat",
    "DtypeError",
    "FakeQuantize",
    "FloatFormat",
    "FormatError",
    "Granularity",
    "IntFormat",
    "NonFiniteError",
    "Plan",
    "QuantizationParams",
    "QuantizedTensor",
    "RangeError",
    "RecipeError",
    "Scheme",
    "SchemeError",
    "ShapeError",
    "Specials",
    "UnsupportedError",
    "ZeropointError",
    "__version__",
    "calibrate",
    "can_implement",
    "choose_params",
    "convert",
    "dequantize",
    "explain",
    "fake_quantize",
    "fold",
    "format_name",
    "get_format",
    "only_backend",
    "pack",
    "plan",
    "prepare",
    "quantize",
    "quantize_model",
    "unpack",
]
