"""The checkpoint stream: read, plan, quantize in tiles, publish, verify."""
