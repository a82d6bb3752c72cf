"""What the files of a quantized checkpoint say of each other: index, configuration, layers and their scales.

This module needs no original. It reads small files and small tensors; layers are decoded in proofs.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from ..codecs.compressed_tensors_config import QUANT_METHOD, matches
from ..codecs.fp8_block import QUANT_METHOD as FP8
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..errors import CheckpointError
from .entries import TensorEntry
from .origin import ATTENDANTS
from .problems import Problem
from .proofs import Check, OpenFiles
from .quantize import Scratch
from .selection import Selection, Why, choose, module_of
from .source import MAX_JSON_BYTES, SINGLE_FILE, Source
from .storage import exists, read_small, shown
from .stored import Stored, configuration

# Scales of a quantized cache of keys and values, which belong to the attention and not to a linear layer.
_CACHE = frozenset(f"{what}_{kind}" for what in "qkv" for kind in ("scale", "zero_point", "global_scale"))
_SMALL_BYTES = 1 << 20
"""Most bytes of a scale of inputs, of which there is one for a layer or for a channel."""

# Methods that config.json names, and the files by which other tools say it.
_METHODS = {
    "gptq": "GPTQ (AutoGPTQ, GPTQModel)", "awq": "AWQ (AutoAWQ)", "auto-round": "AutoRound",
    "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt", "bitsandbytes": "bitsandbytes", "hqq": "HQQ",
    "torchao": "torchao", "quanto": "Quanto", "aqlm": "AQLM", "vptq": "VPTQ", "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM", "mxfp4": "gpt-oss (MXFP4)", "spqr": "SpQR", "bitnet": "BitNet",
}  # fmt: skip
_FILES = {
    "hf_quant_config.json": "NVIDIA ModelOpt", "quantize_config.json": "GPTQ (AutoGPTQ)",
    "quant_config.json": "AWQ (AutoAWQ)",
}  # fmt: skip


def require_readable(source: Source) -> None:
    """Raise CheckpointError, with the tool's name, for layouts that are not read here: no half check."""
    config = configuration(source)
    rule = (
        f"whose layout is not read here, so nothing was checked; read are {QUANT_METHOD} and {FP8}: verify "
        "it with the tool that wrote it"
    )
    if config is not None:
        method = str(config.get("quant_method", config.get("quant_algo", "unknown")))
        if method not in (QUANT_METHOD, FP8):
            tool = _METHODS.get(method, "a tool that is not known here")
            raise CheckpointError(
                f"{shown(source.root)} is quantized by {tool} (quant_method is {method!a}), {rule}"
            )
        return
    found = next((str(path) for path in source.companions if str(path) in _FILES), None)
    if found is not None:
        raise CheckpointError(f"{shown(source.root)} is quantized by {_FILES[found]} ({found}), {rule}")


def attendants(stored: Stored) -> dict[str, TensorEntry]:
    """Return, by name, what a quantized checkpoint has beside its layers: scales of inputs and of caches."""
    modules = {layer.module for layer in stored.layers}
    found = {}
    for entry in stored.others:
        module, _, last = entry.name.rpartition(".")
        if last in _CACHE or (last in ATTENDANTS and module in modules):
            found[entry.name] = entry
    return found


class AttendantCheck(Check):
    """Check that a scale of inputs or of a cache is finite and positive."""

    def __init__(self, entry: TensorEntry, files: OpenFiles) -> None:
        super().__init__(entry.name, entry.nbytes)
        self.entry = entry
        self.file = files[entry.file]

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (it needs a few numbers)
        """See :class:`Task`."""
        dtype = TORCH_DTYPES.get(self.entry.dtype)
        if dtype is None or not self.nbytes or self.nbytes > _SMALL_BYTES:
            self.report(
                f"{self.entry.dtype} of shape {list(self.entry.shape)} is neither a scale nor a zero point"
            )
            return
        if self.name.endswith("zero_point"):
            return
        buffer = bytearray(self.nbytes)
        self.file.read_into(memoryview(buffer), self.entry.begin)
        values = torch.frombuffer(buffer, dtype=dtype).double()
        bad = ~(torch.isfinite(values) & (values > 0))
        if bool(bad.any()):
            self.report(f"the scale {float(values[bad][0])} must be finite and positive")


def unlisted(source: Source, stored: Stored) -> list[Problem]:
    """Return linear weights that are neither quantized nor ignored, which loaders leave uninitialized."""
    found = []
    for entry in stored.others:
        module = module_of(entry.name)
        choice = choose(entry, source.entries, Selection(), source.config or {})
        linear = choice.why is Why.LINEAR or module.rpartition(".")[2] == "lm_head"
        if linear and entry.name.endswith(".weight") and not matches(module, stored.ignore):
            named = any(matches(module, group.targets, linear=True) for group in stored.groups)
            if named:
                what = "neither quantized nor ignored by the configuration"
                found.append(Problem(where=module, what=what))
    return found


def idle_targets(stored: Stored) -> list[Problem]:
    """Return modules that a group names one by one and that are not there, such as a layer that got lost."""
    modules = {layer.module for layer in stored.layers}
    modules |= {module_of(entry.name) for entry in stored.others} | {p.where for p in stored.problems}
    return [
        Problem(where=target, what="a group of the configuration names it, but it is not there")
        for target in dict.fromkeys(target for group in stored.groups for target in group.targets)
        if "." in target and not target.startswith("re:") and target not in modules
    ]


def index_problems(source: Source) -> Sequence[Problem]:
    """Return where an index is wrong: of shards, its total size; beside a single file, all that it says."""
    name = source.index or SINGLE_FILE + ".index.json"
    path = source.root / name
    if (source.index is None and source.shards != (SINGLE_FILE,)) or not exists(path):
        return []
    try:
        index = json.loads(read_small(path, limit=MAX_JSON_BYTES)[0])
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        wrong = _misplaced(source, weight_map) if source.index is None else []
        size = metadata.get("total_size")
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [Problem(where=name, what=f"it is not an index: {error!r:.200}")]
    problems = [Problem(where=tensor, what=f"{name} does not say where it is") for tensor in wrong]
    found = sum(entry.nbytes for entry in source.entries.values())
    if size is not None and size != found:
        what = f"total_size is {size!r:.40}, but the tensors have {found} bytes"
        problems.append(Problem(where=name, what=what))
    return problems


def _misplaced(source: Source, weight_map: Mapping[str, object]) -> list[str]:
    wrong = {name for name, shard in weight_map.items() if shard != SINGLE_FILE}
    return sorted(wrong | (weight_map.keys() ^ source.entries.keys()))
