"""zeropoint: few-bit numbers in PyTorch, exact and at memory speed."""

from .errors import (
    CheckpointError,
    DtypeError,
    FormatError,
    NonFiniteError,
    RangeError,
    SchemeError,
    ShapeError,
    UnsupportedError,
    ZeropointError,
)
from .formats import CodebookFormat, FloatFormat, IntFormat, Specials, format_name, get_format
from .functional import choose_params, dequantize, explain, fake_quantize, quantize
from .layout.packing import pack, unpack
from .ops.library import only_backend
from .params import QuantizationParams
from .schemes import Granularity, Scheme
from .tensor import QuantizedTensor

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CodebookFormat",
    "DtypeError",
    "FloatFormat",
    "FormatError",
    "Granularity",
    "IntFormat",
    "NonFiniteError",
    "QuantizationParams",
    "QuantizedTensor",
    "RangeError",
    "Scheme",
    "SchemeError",
    "ShapeError",
    "Specials",
    "UnsupportedError",
    "ZeropointError",
    "__version__",
    "choose_params",
    "dequantize",
    "explain",
    "fake_quantize",
    "format_name",
    "get_format",
    "only_backend",
    "pack",
    "quantize",
    "unpack",
]
