"""How long searching the scales of blocks takes, against rounding to nearest, a copy, and peers' searches.

After the rules come others that other kernels search, and the methods ``mse`` and ``mse_weighted``, from a
weight to its codes, by kernels and, of a few rows, in plain torch.

    python benchmarks/searched_scales.py [--rows 1024] [--columns 4096] [--rounds 7]

Bytes are checked against the reference before anything is timed. Run it with ``.peers/bin/python``
(peers.sh) for the search of llm-compressor's observer ``memoryless_mse``, whose error under the power 2 is
printed with ours. Times are those of the thread, so that other programs on the machine disturb them less;
GB/s are bytes read and written.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable

import torch

import zeropoint as zp
from zeropoint.methods import LayerData, method_named
from zeropoint.methods.mse_weighted import NEED
from zeropoint.ops import reference
from zeropoint.schemes import Scheme
from zeropoint.stats import MeanSquare, Statistics

SCHEMES = ("nvfp4a16", "mxfp4", "mxfp8", "int4:g128")
BY_METHOD = (
    "int4:g128", "int4:g128:asym", "uint4:g64:asym=real", "int8:g128:asym", "nf4:g64", "float8_e4m3fn:g128",
    "nvfp4a16", "mxfp4", "int8:channel", "int4:channel", "int4:g256",
    "int8:channel:asym", "int4:g256:asym",
)  # fmt: skip
METHODS = ("mse", "mse_weighted")
BY_RULE = (
    "int4:g128:scale=search2.4", "int8:g128:scale=search2.4", "float8_e4m3fn:g128:scale=search2.4",
    "nf4:g64:scale=search2.4", "nvfp4a16:scale=search2.4", "mxfp4:scale=search2.4",
)  # fmt: skip
"""Rules that the kernels of the first table do not know."""
PEER = {"nvfp4a16": "NVFP4A16", "mxfp4": "MXFP4A16", "int4:g128": "W4A16"}
"""Schemes of compressed-tensors with the same codes and blocks."""
CHECKED = 16
"""Rows whose bytes are compared."""


def best_time(call: Callable[[], object], rounds: int) -> float:
    """Return the least thread time of a call, in seconds, after one that is not counted."""
    call()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def relative_error(x: torch.Tensor, values: torch.Tensor) -> float:
    """Return the squared error over the squares, times 1000."""
    wide = x.double()
    return float((values.double() - wide).square().sum() / wide.square().sum()) * 1000


def require_same_bytes(x: torch.Tensor, scheme: str) -> None:
    """Raise AssertionError unless kernels give the reference's bytes for some rows."""
    part = x[:CHECKED].contiguous()
    data, stored = reference.quantize_dynamic(part, Scheme.parse(scheme))
    q = zp.quantize(part, scheme)
    same = torch.equal(q.data, data) and all(
        map(torch.equal, map(_bytes, q.params.stored), map(_bytes, stored))
    )
    assert same, f"{scheme}: kernels and reference differ"


def layer_data(columns: int) -> LayerData:
    """Return the mean squares of inputs of unequal size."""
    make = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, columns, generator=make) * torch.randn(columns, generator=make).exp()
    square = MeanSquare(features=columns)
    seen = Statistics(accumulator=square, state=square.update(square.start(), inputs))
    return LayerData(statistics={NEED: seen})


def method_row(x: torch.Tensor, scheme: str, rounds: int) -> list[str]:
    """Return how many values a second each method takes, of kernels after plain torch."""
    parsed, data, part, row = Scheme.parse(scheme), layer_data(x.shape[1]), x[:CHECKED].contiguous(), [scheme]
    for name in METHODS:
        found, speeds = [], []
        for only, values in (("reference", part), (None, x)):
            with zp.only_backend(only):
                call = functools.partial(method_named(name).quantize, values, parsed, data)
                found.append(method_named(name).quantize(part, parsed, data).q)
                speeds.append(values.numel() / best_time(call, rounds if only is None else 1) / 1e6)
        tensors = [(q.data, *q.params.stored) for q in found]
        same = all(map(torch.equal, *([_bytes(x) for x in each] for each in tensors)))
        assert same, f"{name} {scheme}: kernels and reference differ"
        row.append(f"{name} {speeds[1]:.1f} M/s, plain torch {speeds[0]:.2f} M/s")
    return row


def rule_row(x: torch.Tensor, scheme: str, rounds: int) -> str:
    """Return how many values a second a rule takes, of kernels after plain torch."""
    require_same_bytes(x, scheme)
    speed = x.numel() / best_time(lambda: zp.quantize(x, scheme), rounds) / 1e6
    part = x[:CHECKED].contiguous()
    with zp.only_backend("reference"):
        plain = part.numel() / best_time(lambda: zp.quantize(part, scheme), 1) / 1e6
    return f"{scheme} | {speed:.1f} M/s | plain torch {plain:.2f} M/s"


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def peer_search(x: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
    """Return a call of llm-compressor's search that gives the values of the codes."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from llmcompressor.observers.mse_quant import _grid_search_mse

    args = preset_name_to_scheme(name, ["Linear"]).weights
    size, token = args.group_size, args.model_copy(update={"strategy": "token"})
    grouped = args.strategy == "tensor_group"

    def run() -> torch.Tensor:
        observed = x.reshape(x.shape[0], -1, size)[None]
        low, high = _grid_search_mse(observed, args, token, 0.2, 5, 100.0, 2.0, 1.0, 1.0)
        whole = generate_gparam(x.min(), x.max()) if grouped else None
        scale, zero = calculate_qparams(low, high, args, **({"global_scale": whole} if grouped else {}))
        return fake_quantize(x, scale, zero, args, global_scale=whole)

    return run


def main() -> None:
    """Print a row for each scheme."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("--rows", 1024), ("--columns", 4096), ("--rounds", 7)):
        parser.add_argument(option, type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.rows, options.columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    peers = importlib.util.find_spec("llmcompressor") is not None
    other = torch.empty_like(x)
    copied = best_time(lambda: other.copy_(x), options.rounds)
    print(f"copy {2 * x.nbytes / copied / 1e9:.1f} GB/s")
    for scheme in SCHEMES:
        line = [scheme]
        for text in (scheme, f"{scheme}:scale=search"):
            require_same_bytes(x, text)
            q = zp.quantize(x, text)
            taken = best_time(lambda text=text, q=q: zp.quantize(x, text, out=q), options.rounds)
            moved = x.nbytes + q.data.nbytes + sum(p.nbytes for p in q.params.stored)
            error = relative_error(x, q.dequantize(torch.float32))
            line.append(
                f"{moved / taken / 1e9:.2f} GB/s, {x.numel() / taken / 1e6:.0f} M/s, error {error:.3f}"
            )
        if peers and scheme in PEER:
            part = x[: options.rows // 8]
            call = peer_search(part, PEER[scheme])
            taken = best_time(call, 2)
            error = relative_error(part, call().float())
            line.append(f"llm-compressor {part.numel() / taken / 1e6:.1f} M/s, error {error:.3f}")
        print(" | ".join(line), flush=True)
    for scheme in BY_RULE:
        print(rule_row(x, scheme, options.rounds), flush=True)
    for scheme in BY_METHOD:
        print(" | ".join(method_row(x, scheme, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
