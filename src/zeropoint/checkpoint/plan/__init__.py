"""Output layout: every file, offset and size, before a byte is written."""
