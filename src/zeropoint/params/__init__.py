"""Parameters: range or statistics to scales and zero points, and the codes they give. The only home of that arithmetic."""

from .parameters import QuantizationParams

__all__ = ["QuantizationParams"]
