"""The same units of work on a Ray cluster."""
