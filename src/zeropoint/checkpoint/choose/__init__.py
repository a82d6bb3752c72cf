"""Which tensors are quantized, and how: one decision each."""
