"""Reading of checkpoints: files, headers, tensors, quantized layers. It decides nothing."""
