"""Time single linear layers: `python benchmarks/layers.py [--threads 1] [--json FILE]`.

Layers of MiniLM and of a Llama of 1.1 billion parameters, under presets of zeropoint.models, on random inputs
of a normal distribution. First every layer is compared with the plain-torch reference. Then the table: how
many times as fast as torch's float32 the layer is, quantizing its input included, for each number of tokens;
both are measured in turns in the same rounds. The six layers of a block of MiniLM are also called one after
the other, as the model does.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from facts import describe, fail, machine, record
from rich.console import Console
from rich.table import Table
from torch import nn

import zeropoint as zp
from zeropoint.bench.timing import in_turns
from zeropoint.models import QuantizedLinear, calibrate, quantize_model
from zeropoint.recipes import model_preset

SHAPES = ((384, 384), (384, 1536), (1536, 384), (2048, 2048), (2048, 5632), (5632, 2048))
"""Inputs and outputs: attention and feed-forward of the two models."""
ROWS = {f"{k} x {n}": ((k, n),) for k, n in SHAPES} | {"MiniLM's block": (*SHAPES[:1] * 4, *SHAPES[1:3])}
"""What is called, layer after layer."""
PRESETS = ("w8a8", "w8a8_static", "w4a8", "w8a16", "w4a16", "fp8_dynamic")
NEAR = 1e-5
"""Largest difference to the reference, relative to the largest output: sums of 5632 products in float32."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A layer under a preset: by tokens, float32's time over its own (median of rounds) and best seconds."""

    layers: str
    preset: str
    how: str
    factors: dict[int, float]
    best: dict[int, float]


def quantized(layer: nn.Linear, preset: str, x: torch.Tensor) -> QuantizedLinear:
    """Return the layer under a preset, calibrated on ``x`` where it must be."""
    model = nn.Sequential(copy.deepcopy(layer))
    needs = model_preset(preset).needs_calibration
    made = quantize_model(model, preset, calibration=calibrate(model, preset, [x]) if needs else None)
    found = made.model.get_submodule("0")
    assert isinstance(found, QuantizedLinear)
    return found


def check(layer: nn.Module, x: torch.Tensor, name: str) -> None:
    """Compare the layer with the reference."""
    found = layer(x)
    with zp.only_backend("reference"):
        expected = layer(x)
    off = float((found - expected).abs().max() / expected.abs().max())
    if not off < NEAR:
        fail(f"{name} is {off:.1e} from the reference")


def measure(label: str, args: argparse.Namespace) -> list[Measured]:
    """Check and time all presets on some layers."""
    floats = [nn.Linear(*shape) for shape in ROWS[label]]
    inputs = [torch.randn(max(args.tokens), layer.in_features) for layer in floats]
    presets = {
        preset: [quantized(layer, preset, x) for layer, x in zip(floats, inputs, strict=True)]
        for preset in args.presets
    }
    seconds: dict[int, dict[str, list[float]]] = {}
    for tokens in args.tokens:
        parts = [x[:tokens].clone() for x in inputs]
        for preset, made in presets.items():
            for layer, part in zip(made, parts, strict=True):
                check(layer, part, f"{preset} of {label} on {tokens} tokens")
        work = {name: _call(layers, parts) for name, layers in ({"float32": floats} | presets).items()}
        seconds[tokens] = in_turns(work, args.rounds)
    return [
        Measured(
            layers=label,
            preset=preset,
            how=made[0].explain(),
            factors={n: _factor(found, preset) for n, found in seconds.items()},
            best={n: min(found[preset]) for n, found in seconds.items()},
        )
        for preset, made in presets.items()
    ]


def _call(layers: Sequence[nn.Module], inputs: list[torch.Tensor]) -> Callable[[], object]:
    return lambda: [layer(x) for layer, x in zip(layers, inputs, strict=True)]


def _factor(seconds: dict[str, list[float]], name: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds["float32"], seconds[name], strict=False))


def table(results: list[Measured], tokens: list[int], threads: int) -> Table:
    """Return the results as a table."""
    title = f"linear layers, {threads} threads: ms, and times as fast as float32, by tokens"
    out = Table(title=title)
    for name in ("inputs x outputs", "preset"):
        out.add_column(name, no_wrap=True)
    for count in tokens:
        out.add_column(str(count), justify="right", no_wrap=True)
    for r in results:
        times = (f"{r.best[n] * 1e3:.2f}  {r.factors[n]:.2f}x" for n in tokens)
        out.add_row(r.layers, r.preset, *times)
    return out


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--layers", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="LAYERS")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    return parser.parse_args()


def main() -> None:
    """Check, measure, print."""
    args, console = arguments(), Console(width=150)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts = machine()
    console.print(describe(facts), highlight=False)
    with torch.inference_mode():
        results = [found for label in args.layers for found in measure(label, args)]
    console.print(f"{len(results) * len(args.tokens)} results are within {NEAR} of the reference")
    for how in sorted({f"{r.preset}: {r.how}" for r in results}):
        console.print(how, highlight=False)
    console.print(table(results, args.tokens, args.threads))
    record(args.json, facts, threads=args.threads, layers=[asdict(r) for r in results])


if __name__ == "__main__":
    main()
