"""Weights quantized by NNCF next to ours: seconds, and the error of what each decodes to.

    sh tests/oracles/more_peers.sh .peers-openvino
    PYTHONPATH=src tests/oracles/.peers-openvino/bin/python benchmarks/nncf_peer.py -o nncf.csv

A weight of one MatMul is quantized by ``nncf.compress_weights``, and by zeropoint with the same codes and
groups; OpenVINO multiplies its result by an identity matrix in float32, which gives the decoded values. The
best of some rounds counts, one after the other, two threads each.
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
import torch
from nncf import CompressWeightsMode as Mode
from openvino import opset13 as ops

import zeropoint as zp

ROUNDS = 3
CASES: dict[str, tuple[Any, int, str, str]] = {
    "int8:channel": (Mode.INT8_SYM, -1, "int8:channel", "nearest"),
    "uint8:channel:asym": (Mode.INT8_ASYM, -1, "uint8:channel:asym=real", "nearest"),
    "int4:g128": (Mode.INT4_SYM, 128, "int4:g128", "nearest"),
    "int4:g128:scale=signed": (Mode.INT4_SYM, 128, "int4:g128:scale=signed", "nearest"),
    "int4:g128, mse": (Mode.INT4_SYM, 128, "int4:g128", "mse"),
    "uint4:g64:asym": (Mode.INT4_ASYM, 64, "uint4:g64:asym=real", "nearest"),
    "nf4:g64": (Mode.NF4, 64, "nf4:g64", "nearest"),
    "mxfp4": (Mode.MXFP4, 32, "mxfp4", "nearest"),
    "nvfp4": (Mode.NVFP4, 16, "nvfp4", "nearest"),
}
"""NNCF's mode and group, and our scheme and method."""


def model_of(weight: Any) -> ov.Model:
    """Return a model that multiplies (n, inputs) by a weight (outputs, inputs)."""
    x = ops.parameter([-1, weight.shape[1]], np.float32)
    return ov.Model([ops.matmul(x, ops.constant(weight), False, True)], [x])


def values(model: ov.Model, columns: int) -> Any:
    """Return the weight that a model multiplies by, (outputs, inputs) float32."""
    hints = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    return ov.Core().compile_model(model, "CPU", hints)(np.eye(columns, dtype=np.float32))[0].T


def best(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the fastest round, and its result."""
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        result = call()
        found.append((time.perf_counter() - begin, result))
    return min(found, key=lambda each: each[0])


def theirs(weight: Any, mode: Any, group: int) -> tuple[float, Any]:
    """Return seconds and decoded values of NNCF; each round has a model of its own, made before."""
    models = [model_of(weight) for _ in range(ROUNDS)]
    more = {} if group < 0 else {"group_size": group, "ratio": 1.0, "all_layers": True}
    taken, model = best(lambda: nncf.compress_weights(models.pop(), mode=mode, **more))
    return taken, values(model, weight.shape[1])


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("-o", "--out", type=Path, help="write the table as CSV")
    asked = parser.parse_args()
    size: int = asked.size
    logging.getLogger("nncf").setLevel(logging.ERROR)
    torch.set_num_threads(2)
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.02
    norm = float(weight.norm())
    rows = [["scheme", "zeropoint, ms", "NNCF, ms", "zeropoint, error", "NNCF, error"]]
    for title, (mode, group, scheme, method) in CASES.items():
        zp.quantize(weight[:64], scheme, method=method)  # compiles
        ours, q = best(lambda s=scheme, m=method: zp.quantize(weight, s, method=m))
        taken, decoded = theirs(weight.numpy(), mode, group)
        errors = [
            float((found - weight).norm()) / norm for found in (q.dequantize(), torch.from_numpy(decoded))
        ]
        rows.append([f"`{title}`", f"{ours * 1e3:.0f}", f"{taken * 1e3:.0f}", *(f"{e:.5f}" for e in errors)])
        print(" | ".join(rows[-1]), flush=True)
    if asked.out is not None:
        with asked.out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
