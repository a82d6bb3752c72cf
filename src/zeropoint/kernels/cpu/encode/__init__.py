"""Values to codes: scales of blocks, rounding, packing, in one pass over memory."""
