"""Bandwidth of the kernels on this machine."""
