"""What the machine gives: instructions, vectors, tiles, threads, the records of a call, kept machine code."""
