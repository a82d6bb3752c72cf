"""Quantize a checkpoint by the processor and by a GPU: `python benchmarks/gpu_checkpoint.py [--layers 8]`.

Makes a Llama-shaped checkpoint in --folder (a file system in memory, so that no disk is timed), and quantizes
it on both under each scheme, which must give the same files; a difference ends the run with exit code 1. A
first checkpoint of one layer compiles the kernels. Prints seconds, GB/s of the source, and the ratio of both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llama_checkpoint import SIZES, write

import zeropoint as zp
from zeropoint.checkpoint.plan.limits import available_cores

SCHEMES = ("nvfp4a16", "nvfp4a16:scale=search", "mxfp4:scale=search", "int4:g128:scale=search")
DEVICES = (None, "cuda")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of tensors."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


def quantized(source: Path, out: Path, scheme: str, device: str | None) -> float:
    """Return the seconds of a run, and leave its files."""
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    zp.quantize_checkpoint(source, out, scheme, device=device, max_memory="16G", report=False)
    return time.perf_counter() - start


def measure(source: Path, folder: Path, scheme: str, rounds: int) -> dict[str, Any]:
    """Return the best times on both devices; exits where files differ."""
    found, times = {}, dict.fromkeys(DEVICES, float("inf"))
    for _ in range(rounds):
        for device in DEVICES:
            out = folder / f"out {device}"
            times[device] = min(times[device], quantized(source, out, scheme, device))
            found[device] = digests(out)
    if found[None] != found["cuda"]:
        sys.exit(f"files of {scheme} differ")
    nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    host, there = times[None], times["cuda"]
    print(
        f"| `{scheme}` | {host:.2f} | {there:.2f} | {nbytes / host / 1e9:.2f} | {nbytes / there / 1e9:.2f} | "
        f"{host / there:.2f} |",
        flush=True,
    )
    return {"scheme": scheme, "bytes": nbytes, "cpu": host, "cuda": there}


def main() -> None:
    """Run all schemes."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--scale", choices=SIZES, default="full")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        for part, layers in (("small", 1), ("source", asked.layers)):
            write(folder / part, replace(SIZES[asked.scale], num_hidden_layers=layers, shards=2))
        for scheme in asked.schemes:
            for device in DEVICES:
                quantized(folder / "small", folder / "out small", scheme, device)
        print(f"{torch.cuda.get_device_name()}, {available_cores()} cores; all files are equal\n")
        print("| scheme | cores, s | GPU, s | cores, GB/s | GPU, GB/s | ratio |\n|" + " --- |" * 6)
        rows = [measure(folder / "source", folder, scheme, asked.rounds) for scheme in asked.schemes]
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
