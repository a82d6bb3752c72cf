"""What Triton compiles or interprets; nothing here is imported before a tensor lies on a GPU."""
