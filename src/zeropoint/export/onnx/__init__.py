"""Quantized models as ONNX graphs."""

from __future__ import annotations

from .exporter import export_onnx

__all__ = ["export_onnx"]
