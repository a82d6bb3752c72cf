"""zeropoint: few-bit numbers in PyTorch, exact and at memory speed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from .ops.library import only_backend
from .params import QuantizationParams
from .schemes import Granularity, Scheme
from .tensor import QuantizedTensor

if TYPE_CHECKING:
    from .models import calibrate, convert, fold, prepare, quantize_model
    from .prepared import Plan, can_implement, plan
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

_PARTS = {
    **dict.fromkeys(("calibrate", "convert", "fold", "prepare", "quantize_model"), "models"),
    **dict.fromkeys(("Plan", "can_implement", "plan"), "prepared"),
    "FakeQuantize": "training",
}
"""Names and where they are defined: parts that quantizing tensors and checkpoints never needs."""

if not TYPE_CHECKING:  # type checkers would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """Return a name of a part that is imported when it is first used (PEP 562)."""
        if name in ("models", "prepared", "stats", "training"):
            return import_module(f".{name}", __name__)
        if name not in _PARTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_PARTS[name]}", __name__), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
