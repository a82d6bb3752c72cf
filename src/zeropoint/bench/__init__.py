"""How fast the kernels of this machine are, next to a plain copy of as many bytes."""
