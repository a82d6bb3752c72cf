"""torchao in its own environment: `python torchao_peer.py REQUEST.json` prints one JSON object at the end.

The request names an .npy file with the float32 matrix, thread counts, rounds and how many rows to keep for
comparison. The outputs of those rows go to the request's `outputs` file (.npz); the times are next to a copy
in this very process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Copies, in_turns
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

Parts = dict[str, torch.Tensor]
SAME_BYTES = {"mxfp4_e2m1": ("float32", "bfloat16"), "mxfp8_e4m3": ("float32", "bfloat16")}
"""Schemes whose rule torchao shares with us, with the dtypes: the OCP floor rule."""


def _integers(bits: int, group: int | None) -> tuple[Callable[..., Parts], Callable[..., torch.Tensor]]:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def quantize(x: torch.Tensor) -> Parts:
        block = (1, group or x.shape[-1])
        scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, block, torch.int8, low, high)
        return {"codes": quantize_affine(x, block, scale, zero, torch.int8, low, high), "scales": scale}

    def dequantize(q: Parts, dtype: torch.dtype) -> torch.Tensor:
        block = (1, group or q["codes"].shape[-1])
        return dequantize_affine(
            q["codes"], block, q["scales"], None, torch.int8, low, high, output_dtype=dtype
        )

    return quantize, dequantize


def _float8_rows(x: torch.Tensor) -> Parts:
    scale = _choose_scale_float8(x, [1, x.shape[-1]])
    return {"codes": _quantize_affine_float8(x, scale), "scales": scale}


def _float8_back(q: Parts, dtype: torch.dtype) -> torch.Tensor:
    return _dequantize_affine_float8(q["codes"], q["scales"], dtype)


def _mx(element: torch.dtype) -> tuple[Callable[..., Parts], Callable[..., torch.Tensor]]:
    def quantize(x: torch.Tensor) -> Parts:
        q = MXTensor.to_mx(x, element, 32)
        return {"codes": q.qdata, "scales": q.scale, "tensor": q}

    return quantize, _whole_back


def _nvfp4(x: torch.Tensor) -> Parts:
    q = NVFP4Tensor.to_nvfp4(x, 16, per_tensor_amax_to_scale(x.abs().amax()))
    return {"tensor": q}


def _whole_back(q: Parts, dtype: torch.dtype) -> torch.Tensor:
    values: torch.Tensor = q["tensor"].dequantize(dtype)
    return values


WAYS: dict[str, tuple[Callable[..., Parts], Callable[..., torch.Tensor]]] = {
    "int8:channel": _integers(8, None),
    "int4:g128": _integers(4, 128),
    "float8_e4m3fn:channel": (_float8_rows, _float8_back),
    "mxfp4_e2m1": _mx(torch.float4_e2m1fn_x2),
    "mxfp8_e4m3": _mx(torch.float8_e4m3fn),
    "nvfp4": (_nvfp4, _whole_back),
}
"""Scheme to how torchao quantizes and dequantizes; its int4 codes stay unpacked, one a byte."""


def main() -> None:
    """Answer one request."""
    request = json.loads(Path(sys.argv[1]).read_text())
    x32 = torch.from_numpy(np.load(request["input"]))
    sources = {"float32": x32, "bfloat16": x32.bfloat16()}
    outputs: dict[str, Any] = {}
    for scheme, dtypes in SAME_BYTES.items():
        for dtype in dtypes:
            q = WAYS[scheme][0](sources[dtype][: request["rows"]].contiguous())
            for part in ("codes", "scales"):
                outputs[f"{scheme}/{dtype}/{part}"] = q[part].view(torch.uint8).numpy()
    np.savez(request["outputs"], **outputs)
    copies = Copies(2 * x32.nbytes)
    times = []
    for threads in request["threads"]:
        torch.set_num_threads(threads)
        for scheme, (quantize, dequantize) in WAYS.items():
            for dtype, x in sources.items():
                work = _work(x, quantize, dequantize, copies)
                seconds = in_turns(work, request["rounds"])
                times.append({"threads": threads, "scheme": scheme, "dtype": dtype, "seconds": seconds})
    print(json.dumps({"version": metadata.version("torchao"), "times": times}))


def _work(
    x: torch.Tensor, quantize: Callable[..., Parts], dequantize: Callable[..., torch.Tensor], copies: Copies
) -> dict[str, Callable[[], object]]:
    q = quantize(x)
    return {
        "quantize": lambda: quantize(x),
        "dequantize": lambda: dequantize(q, x.dtype),
        "copy": copies.of(x.nbytes),
    }


if __name__ == "__main__":
    main()
