"""What a checkpoint holds: files, headers, tensors, quantized layers. It decides nothing."""
