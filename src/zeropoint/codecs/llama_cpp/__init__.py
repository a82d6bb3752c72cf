"""llama.cpp's tensor names, model metadata and tokenizers in GGUF.

Source: ggml-org/llama.cpp, conversion/ and gguf-py/gguf/constants.py, as of llama-cpp-python 0.3.36.
"""
