"""Codes to values, and values to the nearest values that codes have."""
