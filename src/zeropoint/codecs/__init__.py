"""Checkpoint layouts of quantized tensors, one module per layout."""
