"""Names of all codecs, for help texts without loading codecs."""

NAMES = (
    "compressed-tensors", "awq", "bitsandbytes", "fp8-block", "gguf", "gpt-oss", "gptq", "hqq", "llm-int8",
    "mlx", "modelopt", "onnx", "onnx-matmulnbits", "quanto", "quark", "torchao",
)  # fmt: skip
"""The usual one, then the others in the order of the alphabet."""
