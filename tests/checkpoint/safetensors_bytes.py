"""Build the bytes of safetensors files by hand, well formed or not."""

import json


def blob(header: object, data: bytes = b"") -> bytes:
    """Join length, header (JSON text, or what becomes it) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def spec(begin: int, end: int, *, dtype: object = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}
