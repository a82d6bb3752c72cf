"""Outputs as llm-compressor writes them, in shards, and ways to damage one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.oracles import llmcompressor_golden

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run

INDEX = "model.safetensors.index.json"
GOLDEN = json.loads(llmcompressor_golden.GOLDEN.read_text())["cases"]


def as_llm_compressor(source: Path, out: Path, preset: str, dtype: str, *, moe: bool) -> Path:
    """Write what llm-compressor 0.14 writes: tensors of the hashes that it gave, its configuration, no more.

    The run's own tensors are theirs to the byte (test_llmcompressor_golden.py); here that is asserted again.
    """
    run(make_plan(open_source(source), preset.lower()), out)
    golden = GOLDEN[llmcompressor_golden.case_name(preset, dtype, moe)]
    assert llmcompressor_golden.tensors_of(out) == golden["tensors"]
    (out / "zeropoint_manifest.json").unlink(missing_ok=True)
    change_json(out / "config.json", lambda c: c.update(quantization_config=golden["quantization_config"]))
    return out


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def shard_of(out: Path, name: str) -> Path:
    """Return the file that the index gives for a tensor."""
    return out / json.loads((out / INDEX).read_text())["weight_map"][name]


def change_tensor(out: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """Change a tensor in place, in its file."""
    path = shard_of(out, name)
    tensors = load_file(path)
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    change(tensors[name])
    save_file(tensors, path, metadata)


def replace_tensors(out: Path, shard: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Add, rename or drop tensors of a file, and write the index anew, so that only the change is wrong."""
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    found = {path.name: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    sizes = [t.numel() * t.element_size() for part in found.values() for t in part.values()]
    weight_map = {name: shard for shard, part in found.items() for name in part}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(index))
