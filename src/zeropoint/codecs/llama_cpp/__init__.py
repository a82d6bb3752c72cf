"""What llama.cpp asks of a GGUF file besides blocks: its names, values of the model, and the tokenizer.

Source: ggml-org/llama.cpp, conversion/ and gguf-py/gguf/constants.py, as of llama-cpp-python 0.3.36.
"""
