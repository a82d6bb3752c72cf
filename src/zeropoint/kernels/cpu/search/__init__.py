"""The searches of llama.cpp, compiled: a lane of a vector is a block, so that its sums keep their order."""
