"""A checkpoint so small that every step of its quantization can fail once: 3 shards, 12 tensors.

The q, k and v projections, and gate and up, share one tensor scale each, and lie in different shards; one of
them needs several units. Norm, embedding and head are kept, and two companions copied.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

from zeropoint.checkpoint.plan import limits, output_tensors
from zeropoint.checkpoint.run import commit, units
from zeropoint.checkpoint.run.unit_results import ScanResult, UnitResult
from zeropoint.cli import app

LAYER = "model.layers.0"
HIDDEN = 32
SHARDS: tuple[dict[str, tuple[int, ...]], ...] = (
    {
        "model.embed_tokens.weight": (24, HIDDEN),
        f"{LAYER}.input_layernorm.weight": (HIDDEN,),
        f"{LAYER}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{LAYER}.self_attn.k_proj.weight": (HIDDEN, HIDDEN),
    },
    {
        f"{LAYER}.self_attn.v_proj.weight": (HIDDEN, HIDDEN),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{LAYER}.mlp.gate_proj.weight": (64, HIDDEN),
        f"{LAYER}.post_attention_layernorm.weight": (HIDDEN,),
    },
    {
        f"{LAYER}.mlp.up_proj.weight": (64, HIDDEN),
        f"{LAYER}.mlp.down_proj.weight": (HIDDEN, 64),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (24, HIDDEN),
    },
)
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
SCHEME = "nvfp4a16"


def shard_name(number: int) -> str:
    """Return the name of a shard, counted from 0."""
    return f"model-{number + 1:05}-of-{len(SHARDS):05}.safetensors"


def write_tiny(folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint and return its directory."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(SHARDS):
        name = shard_name(number)
        tensors = {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling": "mean"}')
    return folder


@contextlib.contextmanager
def small_units() -> Iterator[None]:
    """Cut weights into several units inside the block, units into tiles, and commit after every few units."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(output_tensors, "UNIT_VALUES", 512)
        patched.setattr(units, "UNIT_BYTES", 512)
        patched.setattr(commit, "COMMIT_BYTES", 1200)
        patched.setattr(commit, "COMMIT_SECONDS", math.inf)
        patched.setattr(commit.Commit, "add", _add_behind_the_last_commit)
        patched.setattr(limits.Limits, "default", staticmethod(_small_tiles))
        patched.setattr(app, "app", _COMMAND)
        yield


_add = commit.Commit.add


def _add_behind_the_last_commit(self: commit.Commit, result: ScanResult | UnitResult) -> None:
    """Add a result when the commit before has ended: on a busy machine, several would become one, and a run
    make fewer calls than the one whose calls were counted."""
    if self._running is not None:
        wait([self._running])
    _add(self, result)


_default = limits.Limits.default
# What calling the app makes of it anew each time, which takes a third of the time of a run.
_COMMAND = typer.main.get_command(app.app)


def _small_tiles(
    workers: int | None = None, max_memory: int | None = None, device: str | None = None
) -> limits.Limits:
    return replace(_default(workers, max_memory, device), tile_values=256)
