"""llama.cpp's C kernels through ctypes: libggml-base of llama-cpp-python, one thread, float32 in and out.

Blocks of 32: Q4_0 is a float16 scale and 16 bytes of codes, Q8_0 a float16 scale and 32 bytes, MXFP4 one
exponent byte and 16 bytes. Nibbles are in halves: the low nibble of byte j is value j, the high one j + 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import zeropoint as zp
from zeropoint.codecs.containers.gguf import TYPES

BLOCK = 32


@dataclass(frozen=True)
class Kind:
    """A ggml type: its number in ggml.h and the bytes of one block."""

    number: int
    block_bytes: int


KINDS = {"Q4_0": Kind(2, 18), "Q8_0": Kind(8, 34), "MXFP4": Kind(39, 17)}
RULES = {
    "Q4_0": "not our rule: the scale is the signed value of largest magnitude over -8, in float16",
    "Q8_0": "not our rule: the scale is amax / 127 in float16, codes are rounded half away from zero",
    "MXFP4": "our rule but for ties between two codes",
}


class Ggml:
    """The library at ``path``."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._quantize = self._library.ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        self._quantize.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ]  # fmt: skip

    def quantize(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the blocks of a contiguous float32 matrix, uint8 ``(rows, cols / 32, block bytes)``."""
        rows, cols = x.shape
        kind = KINDS[name]
        out = torch.empty(rows, cols // BLOCK, kind.block_bytes, dtype=torch.uint8)
        written = self._quantize(kind.number, x.data_ptr(), out.data_ptr(), 0, rows, cols, None)
        assert written == out.numel()
        return out

    def blocks(self, name: str, x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        """Return the rows of blocks of any type by its name, under importance of columns if given."""
        number, nbytes = TYPES[name].number, x.shape[1] // TYPES[name].block * TYPES[name].nbytes
        out = torch.empty(x.shape[0], nbytes, dtype=torch.uint8)
        weights = None if importance is None else importance.data_ptr()
        self._quantize(number, x.data_ptr(), out.data_ptr(), 0, *x.shape, weights)
        return out

    def dequantize(self, name: str, blocks: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a call that gives the float32 values of ``blocks``."""
        decode = getattr(self._library, f"dequantize_row_{name.lower()}")
        decode.restype, decode.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        rows, width, _ = blocks.shape

        def call() -> torch.Tensor:
            out = torch.empty(rows, width * BLOCK)
            decode(blocks.data_ptr(), out.data_ptr(), out.numel())
            return out

        return call


def find(peers_python: Path | None) -> Ggml | None:
    """Return the library of the peers' environment, or None when that has none."""
    if peers_python is None:
        return None
    pattern = "lib/python*/site-packages/llama_cpp/lib/libggml-base.so"
    return next((Ggml(path) for path in peers_python.parent.parent.glob(pattern)), None)


def compared(ggml: Ggml, name: str, part: torch.Tensor) -> str:
    """Return how ggml's output relates to ours, in words; raises AssertionError where equal bytes are not."""
    blocks = ggml.quantize(name, part)
    if name != "MXFP4":
        error = float((ggml.dequantize(name, blocks)() - part).norm() / part.norm())
        return f"{RULES[name]}; its relative error is {error:.4f}"
    ours = zp.quantize(part, "mxfp4_e2m1")
    exponents = ours.scales[0].view(torch.uint8).reshape(blocks.shape[:2])
    assert torch.equal(blocks[:, :, 0], exponents), "MXFP4 scale bytes of ggml differ from ours"
    halves = blocks[:, :, 1:]
    theirs = torch.cat([halves & 15, halves >> 4], dim=-1).reshape(part.shape)
    differ = theirs != ours.codes.to(torch.uint8)
    tied = float(differ.float().mean())
    return f"{RULES[name]}: scale bytes equal, {100 * tied:.3f} % of codes differ"
