"""Measure a tile: quantize it, its error, equality with another tensor, and the threads for this work."""
