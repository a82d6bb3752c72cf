"""Dense products whose sums have one order: Gram matrices, triangular factors, error feedback."""
