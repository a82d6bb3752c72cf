"""The searches of llama.cpp in plain torch: codes and scales that ``ggml_quantize_chunk`` gives, bit for bit.

All arithmetic is that of float32, operation by operation in ggml's order, and blocks are columns: tensors are
(values of a block, blocks), so that a sum over a block adds one row after the other.

Source: ggml-org/llama.cpp, ggml/src/ggml-quants.c, as llama-cpp-python 0.3.36 has it.
"""
