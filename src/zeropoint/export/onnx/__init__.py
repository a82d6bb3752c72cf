"""Quantized models as ONNX graphs."""

from .exporter import export_onnx

__all__ = ["export_onnx"]
