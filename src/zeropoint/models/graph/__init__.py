"""Graph mode: exported programs quantized by a recipe."""

from .calibrate import calibrate_graph
from .convert import convert_graph, quantize_graph
from .prepare import prepare_graph
from .program import to_program

__all__ = ["calibrate_graph", "convert_graph", "prepare_graph", "quantize_graph", "to_program"]
