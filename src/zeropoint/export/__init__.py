"""Models written in formats that other runtimes execute."""
