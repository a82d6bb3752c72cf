"""llama.cpp's searches in plain torch, bit-equal to ``ggml_quantize_chunk``.

All arithmetic is float32, operation by operation in ggml's order, and blocks are columns: tensors are
(values of a block, blocks), so that a sum over a block adds one row after the other.

Source: ggml-org/llama.cpp, ggml/src/ggml-quants.c, as llama-cpp-python 0.3.36 has it.
"""
