"""Models as checkpoints: converted ones saved, quantized checkpoints loaded."""
