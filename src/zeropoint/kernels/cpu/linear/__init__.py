"""Linear layers on integer codes and on values of a quantized weight."""
