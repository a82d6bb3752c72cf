"""Programs that Triton compiles or interprets, imported for GPU tensors only."""
