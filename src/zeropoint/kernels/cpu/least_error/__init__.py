"""Compiled scale searches: lanes are blocks, so sums keep their order."""
