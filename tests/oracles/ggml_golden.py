"""Hash what llama.cpp quantizes to each block type, and store the hashes: run by hand, not by tests.

    python tests/oracles/ggml_golden.py LIBRARY

LIBRARY is libggml-base.so of llama-cpp-python, built from source. It is compiled without
fused multiply-add, so that each operation is rounded. The result is tests/golden/ggml.json: for each type and
each importance the SHA-256 of the blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "ggml.json"
Floats = npt.NDArray[np.float32]
TYPES = {
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
}  # fmt: skip
"""Name to number in ggml.h, values and bytes of a block."""
COLUMNS = 512


def weight() -> Floats:
    """Return rows of many kinds, two of each, whose scales fit float16."""
    stream = np.random.RandomState(19)  # its streams are frozen by numpy's policy (NEP 19)
    shape = 2, COLUMNS
    normal = stream.standard_normal((24, *shape))
    rare = stream.random_sample((2, *shape)) < 0.03
    runs = stream.randint(-30, 14, (2, 32)).repeat(16, 1)
    outlier = normal[0] * 0.01
    outlier[:, 77] = 90.0
    kinds = [
        normal[1], normal[2] * 0.02, normal[3] ** 3, normal[4] + 3, np.abs(normal[5]), -np.abs(normal[6]),
        stream.randint(-40, 41, shape) / 8, stream.randint(-8, 9, shape), stream.randint(0, 2, shape) / 4,
        np.where(rare[0], normal[7], 0.0), np.where(rare[1], normal[8], -0.0), outlier,
        np.zeros(shape), -np.zeros(shape), np.full(shape, -2.5), np.full(shape, 0.7),
        stream.standard_normal((2, 16)).repeat(32, 1), normal[9] * 1e-40, normal[10] * 2.0**runs,
        normal[11] * 10.0 ** stream.uniform(-17, -13, (2, 32)).repeat(16, 1),
        normal[12] * 2.0 ** stream.randint(-60, 14, shape), np.exp2(stream.randint(-8, 8, shape)),
        np.nextafter(np.float32(2) ** stream.randint(-8, 8, (2, 16)), np.float32(0)).repeat(32, 1),
        normal[13] * 1e4, np.linspace(-1, 1, 2 * COLUMNS).reshape(shape), normal[14] * 2.0**-140,
    ]  # fmt: skip
    return np.ascontiguousarray(np.concatenate(kinds).astype(np.float32))


def importances() -> dict[str, Floats | None]:
    """Return importances of the columns by name."""
    stream = np.random.RandomState(20)
    squares = stream.standard_normal(COLUMNS) ** 2
    few = np.where(stream.random_sample(COLUMNS) < 0.1, 2.0 ** stream.randint(-20, 20, COLUMNS), 0)
    made = {"squares": squares, "few": few, "zeros": np.zeros(COLUMNS)}
    return {"none": None} | {name: values.astype(np.float32) for name, values in made.items()}


class GgmlBase:
    """The library at ``path``."""

    def __init__(self, path: str) -> None:
        self._quantize = ctypes.CDLL(path).ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        sizes = [ctypes.c_int64] * 3
        self._quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p]

    def blocks(self, name: str, x: Floats, importance: Floats | None) -> npt.NDArray[np.uint8]:
        """Return the blocks of a matrix, uint8 (rows, bytes)."""
        number, block, size = TYPES[name]
        rows, columns = x.shape
        out = np.empty((rows, columns // block * size), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        assert self._quantize(number, x.ctypes.data, out.ctypes.data, 0, rows, columns, weights) == out.size
        return out


def digest(blocks: npt.NDArray[np.uint8]) -> str:
    """Return the SHA-256 of blocks."""
    return hashlib.sha256(blocks.tobytes()).hexdigest()


def main() -> None:
    """Write the hashes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    library, x = GgmlBase(parser.parse_args().library), weight()
    hashes = {
        name: {of: digest(library.blocks(name, x, given)) for of, given in importances().items()}
        for name in TYPES
    }
    found = {"source": "llama-cpp-python 0.3.36, libggml-base", "types": hashes}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
