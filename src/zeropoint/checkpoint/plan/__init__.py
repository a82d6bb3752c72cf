"""Plan of a run: decisions, readers of rows, and output files."""
