"""Values to codes: block scales, rounding and packing in one pass."""
