"""The manifest of an output, made by hashlib: what a run's own must agree with."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from tests.checkpoint.written import OF_RUNS

NAME = "zeropoint_manifest.json"


def places(shard: Path) -> dict[str, tuple[int, int]]:
    """Return where each tensor of a file lies: its first byte, and its bytes."""
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + length])
    table.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in table.items()}
    return {name: (8 + length + begin, end - begin) for name, (begin, end) in offsets.items()}


def hashes(out: Path) -> dict[str, Any]:
    """Return what a manifest must say of files and tensors, with one part for each tensor and file."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file() and path.name not in OF_RUNS):
        name, raw = str(path.relative_to(out)), path.read_bytes()
        if path.suffix != ".safetensors":
            digest = hashlib.sha256(raw).hexdigest()
            files[name] = {"size": len(raw), "parts": [[0, len(raw), digest]]}
            continue
        found = places(path)
        end = min((begin for begin, _ in found.values()), default=len(raw))
        files[name] = {"size": len(raw), "header": hashlib.sha256(raw[:end]).hexdigest()}
        for tensor, (begin, size) in found.items():
            digest = hashlib.sha256(raw[begin : begin + size]).hexdigest()
            tensors[tensor] = {"file": name, "parts": [[begin, size, digest]] if size else []}
    return {"files": files, "tensors": tensors}


def write(out: Path, **changes: Any) -> Path:
    """Write a manifest of an output as it is now, with some members changed, and return its path."""
    table = {"format": 1, "zeropoint": "0", "identity": {}, **hashes(out), "weights": {}, **changes}
    text = json.dumps(table, indent=1)[:-1].rstrip() + ",\n"
    seal = hashlib.sha256(text.encode()).hexdigest()
    path = out / NAME
    path.write_text(f'{text}"sha256": "{seal}"\n}}\n')
    return path
