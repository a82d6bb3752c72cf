"""Selection: one decision for each tensor, quantized how or kept why."""
