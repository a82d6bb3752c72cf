"""The stream: read a checkpoint strictly, plan, quantize in tiles, publish all or nothing, verify."""
