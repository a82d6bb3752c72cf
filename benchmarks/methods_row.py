"""One quantized model, for `methods.py`: `python benchmarks/methods_row.py MODEL OUT SCHEME METHOD WINDOWS`.

It runs in a process of its own, whose time and memory are those of the method, and prints a line of JSON:
{"peak_mb": ...}, or {"unknown": message} for a method that this version does not have, and {"failed":
message} for one that refuses. Nothing but zeropoint is loaded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import zeropoint as zp

WITHOUT_DATA = ("nearest", "mse", "hqq")
"""Methods that are given no data. All others take windows of tokens."""
INPUTS = "+"
"""Stands between the scheme of weights and the scheme of inputs, as in ``int8:channel+int8:token``."""
GGUF = "gguf:"
"""Stands before a file type of llama.cpp, as in ``gguf:q4_k_m``."""


def peak_mb() -> int:
    """Return the most memory that this process held so far, in 10^6 bytes; 0 where the system hides it."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return round(int(found[1]) * 1024 / 1e6) if found else 0


def options_of(scheme: str) -> dict[str, str]:
    """Options of ``quantize_checkpoint`` for the text of a scheme."""
    if scheme.startswith(GGUF):
        return {"to": scheme.removeprefix(GGUF), "format": "gguf", "max_memory": "6G"}
    weight, _, inputs = scheme.partition(INPUTS)
    if not inputs:
        return {"to": weight}
    return {"recipe": f"default: keep\nrules: [{{type: Linear, weight: '{weight}', input: '{inputs}'}}]"}


def quantize(model: str, out: str, scheme: str, method: str, windows: str) -> dict[str, object]:
    """Write a model under a scheme by a method; return what is printed."""
    data = {} if method in WITHOUT_DATA else {"calibration": windows}
    try:
        zp.quantize_checkpoint(model, out, method=method, report=False, **options_of(scheme), **data)
    except zp.errors.RecipeError as error:
        if "is unknown" in str(error):
            return {"unknown": str(error)}
        return {"failed": str(error)}
    except zp.errors.ZeropointError as error:
        return {"failed": str(error)}
    return {"peak_mb": peak_mb()}


if __name__ == "__main__":
    print(json.dumps(quantize(*sys.argv[1:])))
