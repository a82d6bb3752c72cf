"""Measurement of tiles: quantization, error, equality, and worker threads."""
