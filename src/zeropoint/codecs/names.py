"""The names of all codecs, for texts of help that must not wait for the codecs themselves."""

NAMES = (
    "compressed-tensors", "awq", "bitsandbytes", "fp8-block", "gguf", "gpt-oss", "gptq", "hqq", "llm-int8",
    "mlx", "modelopt", "onnx", "onnx-matmulnbits", "quanto", "quark", "torchao",
)  # fmt: skip
"""The usual one, then the others in the order of the alphabet."""
