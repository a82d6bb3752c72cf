"""Parameters: from ranges to scales and zero points, and the codes they give: the home of that arithmetic."""

from .parameters import QuantizationParams

__all__ = ["QuantizationParams"]
