"""Verification of outputs against their manifest and source."""
