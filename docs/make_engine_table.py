"""The table of layouts by engines: figures of runs, and reasons where there is none."""

from __future__ import annotations

import csv
from pathlib import Path

from docs.make_layout_pages import answer
from docs.make_tables import code, table

from zeropoint.codecs.engines import LLAMA_CPP, MLX_LM, ONNXRUNTIME, TRANSFORMERS, VLLM
from zeropoint.codecs.layer_schemes import preset_layers
from zeropoint.codecs.registry import CODECS

TABLES = Path(__file__).parent / "evidence" / "tables"
RELEASES = {
    TRANSFORMERS: "5.23", VLLM: "0.32", LLAMA_CPP: "(llama-cpp-python 0.3.36)",
    ONNXRUNTIME: "1.31", MLX_LM: "0.32",
}  # fmt: skip
"""Of the engines that ran here, in the order of columns."""
TINY = {
    ("gpt-oss", TRANSFORMERS): "ran, tiny, logits equal",
    ("gpt-oss", MLX_LM): "ran, tiny, logits within 2e-5",
    ("gguf", TRANSFORMERS): "18 families ran, tiny, logits within 1e-5",
    ("awq", MLX_LM): "ran, tiny, logits within 0.2 %",
    ("fp8-block", MLX_LM): "DeepSeek-V3 alone: ran, tiny, logits within 0.8 %",
    ("mmproj", LLAMA_CPP): "ran, tiny, embeddings within 0.5 % of transformers",
}
"""Runs of tiny models by tests of the layout, where none of a larger model is in the tables."""


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of measurements."""
    with (TABLES / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _spread(figures: list[float]) -> str:
    low, high = f"{min(figures):.2g}", f"{max(figures):.2g}"
    return low if low == high else f"{low} to {high}"


def of_logits(layout: str, engine: str) -> str:
    """Return what engine_rows.csv has of a layout in an engine, or nothing."""
    apart = [
        float(row["Largest difference of a logit"])
        for row in rows("engine_rows.csv")
        if row["Layout"] == code(layout)
        and row["Engine"].startswith(engine)
        and row["Largest difference of a logit"]
    ]
    return f"{len(apart)} ran, logits {_spread(apart)} apart" if apart else ""


def of_vllm(layout: str) -> str:
    """Return what vllm_runs.csv has of a layout, or nothing."""
    found = [row for row in rows("vllm_runs.csv") if row["Layout"] == code(layout)]
    did = [row["vLLM on a CPU"] for row in found]
    apart = [
        float(row["Apart (rms)"]) / float(row["bfloat16 from float32 (rms)"])
        for row, what in zip(found, did, strict=True)
        if what.startswith("ran") and not row["Apart (rms)"].startswith("cosine")
    ]
    counts = {
        "ran": sum(what.startswith("ran") for what in did),
        "loaded": sum(what.startswith("no kernel") for what in did),
        "refused": sum(what.startswith(("refused", "no:")) for what in did),
    }
    said = [f"{count} {what}" for what, count in counts.items() if count]
    if apart:
        said[0] += f", {_spread(apart)} times as far as bfloat16"
    return "; ".join(said)


def engine_figures() -> str:
    """Return a row for each layout and a column for each engine, and the reasons by number."""
    reasons: dict[str, int] = {}
    lines = []
    for layout, codec in CODECS.items():
        first = next(iter(preset_layers(codec)))
        cells = []
        for engine in RELEASES:
            found = of_vllm(layout) if engine == VLLM else of_logits(layout, engine)
            if not (found or TINY.get((layout, engine))):
                loads, why = answer(codec, engine, first)
                found = f"{loads} ({reasons.setdefault(why, len(reasons) + 1)})" if why else loads
            cells.append(found or TINY[layout, engine])
        lines.append((code(layout), *cells))
    head = ("Layout", *(f"{engine} {release}" for engine, release in RELEASES.items()))
    listed = "\n".join(f"{number}. {why}" for why, number in reasons.items())
    return f"{table(head, lines)}\n{listed}\n"
