"""Instructions, vectors, tiles, threads, call records, and the cache of machine code."""
