"""Quantization schemes as values, and their text form, without tensors."""

from .dialects import DIALECTS, Arithmetic, Dialect, Scaling, TensorScale, ZeroPointPlace, get_dialect
from .granularity import Granularity
from .presets import PRESETS, Preset
from .scale_rules import Linear, PowerOfTwo, ScaleRule
from .scales import ScaleLevel
from .scheme import RangeRule, Rounding, Scheme, ZeroPoint

__all__ = [
    "DIALECTS",
    "PRESETS",
    "Arithmetic",
    "Dialect",
    "Granularity",
    "Linear",
    "PowerOfTwo",
    "Preset",
    "RangeRule",
    "Rounding",
    "ScaleLevel",
    "ScaleRule",
    "Scaling",
    "Scheme",
    "TensorScale",
    "ZeroPoint",
    "ZeroPointPlace",
    "get_dialect",
]
