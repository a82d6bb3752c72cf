"""Read what was written and prove it, against its manifest and its source."""
