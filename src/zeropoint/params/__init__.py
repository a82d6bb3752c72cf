"""Parameter arithmetic: from ranges to scales, zero points and codes."""

from .parameters import QuantizationParams

__all__ = ["QuantizationParams"]
