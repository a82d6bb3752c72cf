"""Checkpoints written on the spot, and what their files hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.recipe import KEEP
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import RunResult, run

LINEAR = "model.layers.0.mlp.up_proj.weight"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "dtype": "bfloat16"}
ONE = Limits(workers=1)
OF_RUNS = ("zeropoint_manifest.json", "zeropoint_report.html")
"""Files that say what a run was made of, and where its model ran."""


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, object] | None = CONFIG,
    **more: str,
) -> Path:
    """Write one file of tensors, with its configuration and more metadata, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt", **more})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantize(source: Path, out: Path, to: str = "int8:channel", **selection: tuple[str, ...]) -> RunResult:
    """Quantize a checkpoint on one thread."""
    return run(make_plan(open_source(source), to, selection=Selection(**selection), limits=ONE), out)


def dequantized(source: Path, out: Path, floats: str | None = None) -> dict[str, torch.Tensor]:
    """Dequantize all weights of a checkpoint, to another dtype if given, and return the tensors written."""
    every = Selection(dequantize=DequantizePolicy.EVERY, floats=floats)
    run(make_plan(open_source(source), KEEP, selection=every), out)
    return tensors_of(out)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor in the files of a folder."""
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
