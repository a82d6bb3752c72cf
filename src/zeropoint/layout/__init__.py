"""Memory layout: blocks of a tensor, codes in bytes, independent of formats."""
