"""Dense products in one order: Gram matrices, triangular factors, error feedback."""
