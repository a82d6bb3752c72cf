"""What will be written: every file, offset and size, before a byte is."""
